"""Adopted layers against float64: vLLM's own layer code in front, our kernels behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.testing import changed_blocks, poisoned_memory

SLOTS, MAX_RANK = 4, 16
Slices = list[tuple[Tensor, Tensor] | None]


@pytest.fixture(autouse=True)
def _interpreted(has_gpu: bool) -> Iterator[None]:
    """Memory is NaN until somebody writes it; the interpreter takes milliseconds per program."""

    def fewer(config: dict[str, int]) -> dict[str, int]:
        changed = dict(config)
        if "split_k" in config:
            changed["split_k"] = min(config["split_k"], 2)
        return changed

    with poisoned_memory(), changed_blocks((lambda config: config) if has_gpu else fewer):
        yield


@dataclass(frozen=True)
class Mapping:
    """``LoRAMapping``."""

    index_mapping: tuple[int, ...]
    prompt_mapping: tuple[int, ...]
    is_prefill: bool = True


@dataclass(frozen=True)
class Case:
    """One kind of layer, and how its adapters come: one tensor, or one per slice."""

    name: str
    kind: str
    base: str
    in_features: int
    outputs: tuple[int, ...]
    has_parts: bool = False
    bias: bool = False
    method: str = "UnquantizedLinearMethod"
    dtype: torch.dtype = torch.float32
    max_rank: int = MAX_RANK


CASES = [
    Case("column", "ColumnParallelLinearWithLoRA", "ColumnParallelLinear", 64, (48,), bias=True),
    Case("gate_up", "MergedColumnParallelLinearWithLoRA", "MergedColumnParallelLinear", 64,
         (48, 48), has_parts=True),
    Case("qkv", "MergedQKVParallelLinearWithLoRA", "QKVParallelLinear", 64, (64, 32, 32),
         has_parts=True, bias=True),
    Case("qkv in one", "QKVParallelLinearWithLoRA", "QKVParallelLinear", 64, (64, 32, 32)),
    Case("row", "RowParallelLinearWithLoRA", "RowParallelLinear", 96, (64,), bias=True),
    Case("replicated", "ReplicatedLinearWithLoRA", "ReplicatedLinear", 64, (24,), bias=True),
    Case("three of a kind", "MergedColumnParallelLinearVariableSliceWithLoRA",
         "MergedColumnParallelLinear", 64, (32, 16, 48), has_parts=True),
    Case("fp16", "MergedQKVParallelLinearWithLoRA", "QKVParallelLinear", 64, (64, 32, 32),
         has_parts=True, dtype=torch.float16),
    Case("odd sizes", "ReplicatedLinearWithLoRA", "ReplicatedLinear", 50, (33,), max_rank=13),
    Case("quantised column", "ColumnParallelLinearWithLoRA", "ColumnParallelLinear", 64, (48,),
         bias=True, method="Fp8LinearMethod"),
    Case("quantised qkv", "MergedQKVParallelLinearWithLoRA", "QKVParallelLinear", 64,
         (64, 32, 32), has_parts=True, method="Fp8LinearMethod"),
    Case("quantised row", "RowParallelLinearWithLoRA", "RowParallelLinear", 96, (64,),
         method="Fp8LinearMethod"),
    Case("quantised replicated", "ReplicatedLinearWithLoRA", "ReplicatedLinear", 64, (24,),
         bias=True, method="Fp8LinearMethod"),
]  # fmt: skip


class Layer:
    """One adopted layer, its manager, and what was loaded into its slots."""

    def __init__(
        self, vllm: SimpleNamespace, version: str, case: Case, device: torch.device,
        tp: tuple[int, int] = (1, 0), whole: Any = None,
    ) -> None:  # fmt: skip
        self.case = case
        base_class = getattr(vllm.bases, case.base)
        self.base = base_class(
            case.in_features, case.outputs, bias=case.bias, tp=tp, dtype=case.dtype,
            method=getattr(vllm.bases, case.method), device=device,
        )  # fmt: skip
        if whole is not None:
            whole(self.base)
        self.layer = vllm.make_layer(version, case.kind, self.base, SLOTS, case.max_rank)
        self.manager = vllm.Manager({"layer": self.layer}, SLOTS, case.dtype, device=device)
        impl = "auto" if device.type == "cuda" else "triton"
        self.config = vllm.adopted(self.manager, impl)
        self.adapters: dict[int, Slices] = {}

    def load(self, slot: int, ranks: list[int], seed: int = 0) -> None:
        """Set a slot, with one rank per slice (0: the slice is absent)."""
        generator = torch.Generator().manual_seed(100 * slot + seed)
        widths = self.case.outputs if self.case.has_parts else (sum(self.case.outputs),)

        def draw(*shape: int) -> Tensor:
            made = torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
            return made.to(self.base.weight)

        parts: Slices = [
            (draw(rank, self.case.in_features), draw(width, rank)) if rank else None
            for width, rank in zip(widths, ranks, strict=True)
        ]
        self.adapters[slot] = parts
        if self.case.has_parts:
            self.layer.set_lora(slot, [p and p[0] for p in parts], [p and p[1] for p in parts])
        else:
            assert parts[0] is not None
            self.layer.set_lora(slot, *parts[0])

    def reset(self, slot: int) -> None:
        self.layer.reset_lora(slot)
        self.adapters[slot] = [None] * len(self.case.outputs)

    def step(self, slots: list[int]) -> None:
        """Say which slot each token uses, -1 = base; vLLM's ids are slots counted from 1."""
        ids = tuple(slot + 1 for slot in slots)
        self.manager.wrapper.update_metadata(
            Mapping(ids, ids), [slot + 1 for slot in range(SLOTS)], SLOTS + 1, 100
        )

    def run(self, x: Tensor) -> Tensor:
        y = self.layer(x)[0]
        assert isinstance(y, Tensor)
        return y

    def truth(self, x: Tensor, slots: list[int], dtype: torch.dtype) -> Tensor:
        """The same with plain torch in another dtype, row by row."""
        base = SimpleNamespace(weight=self.base.weight.to(dtype))
        bias = None if self.base.bias is None else self.base.bias.to(dtype)
        y = self.base.quant_method.apply(base, x.to(dtype), bias)
        widths = self.case.outputs if self.case.has_parts else (sum(self.case.outputs),)
        for row, slot in enumerate(slots):
            start = 0
            for part, width in zip(self.adapters.get(slot, []), widths, strict=False):
                if part is not None:
                    a, b = (t.to(dtype) for t in part)
                    y[row, start : start + width] += (x[row].to(dtype) @ a.T) @ b.T
                start += width
        return y


def check(layer: Layer, slots: list[int], rows: int = 0) -> None:
    """Twice the error of eager torch in the same dtype, and one rounding."""
    x = torch.randn(rows or len(slots), layer.case.in_features).to(layer.base.weight)
    y = layer.run(x)
    assert torch.isfinite(y).all()
    exact = layer.truth(x, slots, torch.float64)
    eager = (layer.truth(x, slots, layer.case.dtype).double() - exact).abs().max()
    limit = 2 * eager + torch.finfo(layer.case.dtype).eps * exact.abs().max()
    assert (y.double() - exact).abs().max() <= limit


FIRST, NEWEST, FAKE = "0.26.0", "newest", "fake"
SOME = [case for case in CASES if case.name in ("column", "qkv", "row", "quantised qkv")]
LAYERS = [(FIRST, case) for case in CASES] + [(v, case) for v in (NEWEST, FAKE) for case in SOME]


@pytest.fixture(params=LAYERS, ids=lambda param: f"{param[0]}-{param[1].name}")
def layer(request: pytest.FixtureRequest, vllm: SimpleNamespace, device: torch.device) -> Layer:
    version, case = request.param
    made = Layer(vllm, version, case, device)
    parts = len(made.case.outputs) if made.case.has_parts else 1
    made.load(0, [made.case.max_rank] * parts)
    made.load(1, [5, 0, 3][:parts])
    made.load(3, [8] * parts)
    return made


MIXED = [3, -1, 0, 1, 1, -1, 0]


def test_mixed_step(layer: Layer) -> None:
    layer.step(MIXED)
    check(layer, MIXED)


def test_rows_past_the_tokens_are_base_rows(layer: Layer) -> None:
    """A CUDA graph is replayed with more rows than the step has tokens, and with stale buffers."""
    layer.step([0] * 40)
    layer.step(MIXED)
    for rows in (16, 40):
        check(layer, MIXED, rows)


def test_slots_change(layer: Layer) -> None:
    """A slot's new adapter has other ranks, or no weights here; nothing of the old one stays."""
    parts = len(layer.case.outputs) if layer.case.has_parts else 1
    layer.step(MIXED)
    layer.load(0, [2, 4, 0][:parts], seed=1)
    layer.reset(3)
    check(layer, MIXED)
    layer.load(3, [layer.case.max_rank] * parts, seed=2)
    check(layer, MIXED)


def test_base_step_is_the_base_layer(layer: Layer) -> None:
    layer.step([-1] * 5)
    x = torch.randn(5, layer.case.in_features).to(layer.base.weight)
    assert torch.equal(layer.run(x), layer.base(x)[0])


def test_long_step(layer: Layer) -> None:
    slots = [0] * 70 + [3, -1] * 30 + [1] * 20
    layer.step(slots)
    check(layer, slots)


def test_extra_batch_axis(layer: Layer) -> None:
    """Models of the transformers backend have [1, M, K]."""
    layer.step(MIXED)
    x = torch.randn(1, len(MIXED), layer.case.in_features).to(layer.base.weight)
    y = layer.run(x)
    assert y.shape == (1, len(MIXED), sum(layer.case.outputs))
    assert torch.equal(y[0], layer.run(x[0]))


@pytest.mark.gpu
def test_captured_graph_sees_later_steps(layer: Layer) -> None:
    """Captured with dummy adapters on 16 rows, replayed for other tokens and other adapters."""
    x = torch.randn(16, layer.case.in_features).to(layer.base.weight)
    layer.step([0, 1, 3, 0] * 4)
    layer.run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.run(x)
    for slots in (MIXED, [-1] * 16, [1] * 3, [0, 3] * 8):
        layer.step(slots)
        layer.load(3, [2] * (len(layer.case.outputs) if layer.case.has_parts else 1), seed=3)
        graph.replay()
        exact = layer.truth(x, slots, torch.float64)
        eager = (layer.truth(x, slots, layer.case.dtype).double() - exact).abs().max()
        limit = 2 * eager + torch.finfo(layer.case.dtype).eps * exact.abs().max()
        assert (y.double() - exact).abs().max() <= limit


COMPILED = [pair for pair in LAYERS if pair[1].name in ("qkv", "row", "quantised qkv")]


@pytest.mark.parametrize("layer", COMPILED, indirect=True, ids=lambda p: f"{p[0]}-{p[1].name}")
def test_compiled_whole_and_dynamic(layer: Layer) -> None:
    """One graph for all numbers of rows, which sees what later steps and loads wrote."""
    torch._dynamo.reset()
    compiled = torch.compile(layer.run, fullgraph=True, dynamic=True, backend="aot_eager")
    layer.step(MIXED)
    with torch.no_grad():
        compiled(torch.randn(7, layer.case.in_features).to(layer.base.weight))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for slots in ([-1] * 9, [0, 1, 3] * 7):
                layer.step(slots)
                x = torch.randn(len(slots), layer.case.in_features).to(layer.base.weight)
                assert torch.equal(compiled(x), layer.run(x))
                layer.reset(0)


@pytest.mark.parametrize(
    "case", [case for case in CASES if "three" not in case.name and "odd" not in case.name],
    ids=lambda case: case.name,
)  # fmt: skip
def test_two_ranks_give_what_one_gives(
    case: Case, vllm: SimpleNamespace, device: torch.device
) -> None:
    case = dataclasses.replace(case, bias=False)
    one = Layer(vllm, FIRST, case, device)
    ranks = [Layer(vllm, FIRST, case, device, (2, rank), share(one, rank)) for rank in (0, 1)]
    parts = len(case.outputs) if case.has_parts else 1
    for layer in (one, *ranks):
        layer.load(0, [16, 0, 8][:parts])
        layer.load(2, [3] * parts)
        layer.step([0, 2, -1, 2])
    x = torch.randn(4, case.in_features).to(one.base.weight)
    whole = one.run(x)
    if case.base == "RowParallelLinear":
        half = case.in_features // 2
        joined = ranks[0].run(x[:, :half]) + ranks[1].run(x[:, half:])
    elif case.base == "ReplicatedLinear":
        joined = ranks[1].run(x)
    else:
        ys = [layer.run(x) for layer in ranks]
        halves = [[w // 2 for w in case.outputs]] * 2
        split = [y.split(h, dim=1) for y, h in zip(ys, halves, strict=True)]
        joined = torch.cat([part for pair in zip(*split, strict=True) for part in pair], dim=1)
    tolerance = 8 * torch.finfo(case.dtype).eps * whole.abs().max()
    assert (joined - whole).abs().max() <= tolerance


def share(one: Layer, rank: int) -> Callable[[Any], None]:
    """Copies rank's part of a whole base layer into a base layer of two ranks."""

    def copy(base: Any) -> None:
        weight = one.base.weight
        if one.case.base == "RowParallelLinear":
            part = weight.chunk(2, dim=1)[rank]
        elif one.case.base == "ReplicatedLinear":
            part = weight
        else:
            part = torch.cat([w.chunk(2)[rank] for w in weight.split(list(one.case.outputs))])
        base.weight.data.copy_(part)

    return copy
