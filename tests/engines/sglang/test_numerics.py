"""The backend's numbers against float64: packed A, mixed ranks, base rows, slots that change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex import Routing
from loraplex.testing import changed_blocks

RANKS, SCALINGS = [8, 0, 16, 3, 13], [0.5, 9.0, 2.0, 1.0, 0.25]
SLOTS, LENGTHS = [2, 1, 0, 3, 4, 2], [1, 3, 2, 1, 4, 2]


QKV = (64, 16, 16)


@dataclass(frozen=True)
class Case:
    """One layer, and one way to run it."""

    name: str
    impl: str
    layer: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("fused", "fused"),
    Case("fused, q k v", "fused", {"slices": QKV, "bias": True}),
    Case("fused, gate up, fp16", "fused", {"slices": (40, 40), "dtype": torch.float16}),
    Case("fused, odd sizes", "fused", {"slices": (33, 7), "in_features": 50, "max_rank": 13}),
    Case("fused, rows", "fused", {"kind": "row"}),
    Case("reference", "torch", {"slices": QKV, "bias": True}),
    Case("reference, bf16", "torch", {"slices": QKV, "dtype": torch.bfloat16}),
    Case("added", "triton", {"slices": QKV, "method": "doubling"}),
    Case("added to a part of the outputs", "triton", {"slices": (24, 24), "extra": 16}),
    Case("added, rows with bias", "triton", {"kind": "row", "bias": True}),
]


@pytest.fixture(autouse=True)
def _fewer_programs(has_gpu: bool) -> Iterator[None]:
    """The interpreter takes milliseconds per program."""
    if has_gpu:
        yield
        return
    with changed_blocks(lambda c: {**c, **({"split_k": 1} if "split_k" in c else {})}):
        yield


def assert_right(
    layer: Any, got: Tensor, x: Tensor, rows: list[int], scalings: list[float]
) -> None:
    """No further from float64 than twice plain torch in the same dtype, and one rounding."""
    truth = layer.truth(x, rows, scalings, torch.float64)
    eager = layer.truth(x, rows, scalings, x.dtype).double()
    rounding = torch.finfo(x.dtype).eps * truth.abs().max()
    assert got.isfinite().all()
    error = (got.double() - truth).abs().max()
    assert error <= 2 * (eager - truth).abs().max() + rounding


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_step_is_right(case: Case, sgl: Any, device: torch.device) -> None:
    made, layer = sgl.backend(5, case.impl), sgl.layer(5, **case.layer)
    ranks = [min(rank, layer.lora_b.shape[2]) for rank in RANKS]
    for slot, rank in enumerate(ranks):
        if rank:
            layer.load(slot, rank)
    rows = sgl.begin(made, SLOTS, ranks, SCALINGS, LENGTHS)
    weight = layer.base_layer.weight
    x = torch.randn(len(rows), weight.shape[1], dtype=weight.dtype, device=device)
    for _ in range(2):
        assert_right(layer, layer.forward(made, x), x, rows, SCALINGS)
    assert made.own_calls == []
    known = made.dense.layer_for(layer, x, layer.lora_a, layer.lora_b, layer.offsets)
    assert known.is_fused == {len(rows): case.impl == "fused"}


def test_base_rows_are_the_base_layer(sgl: Any, device: torch.device) -> None:
    made, layer = sgl.backend(3, "fused"), sgl.layer(3)
    layer.load(0, 16)
    x = torch.randn(6, 64, device=device)
    sgl.begin(made, [1] * 6, [16, 0, 0], [1.0] * 3)
    alone = layer.forward(made, x)
    sgl.begin(made, [0, 1, 0, 1, 0, 1], [16, 0, 0], [1.0] * 3)
    mixed = layer.forward(made, x)
    assert torch.equal(alone[1::2], mixed[1::2])
    assert not torch.allclose(alone[0::2], mixed[0::2])


@pytest.mark.parametrize("impl", ["fused", "torch"])
def test_slots_change_hands(impl: str, sgl: Any, device: torch.device) -> None:
    """A slot gets another rank, and a slot that no step has used gets two adapters in turn."""
    made, layers = sgl.backend(3, impl), [sgl.layer(3, QKV) for _ in range(2)]
    x = torch.randn(4, 64, device=device)

    def check(ranks: list[int], scalings: list[float], slots: list[int]) -> None:
        rows = sgl.begin(made, slots, ranks, scalings)
        for layer in layers:
            assert_right(layer, layer.forward(made, x), x, rows, scalings)

    def load(slot: int, rank: int) -> None:
        for layer in layers:
            layer.load(slot, rank)

    load(0, 8)
    check([8, 0, 0], [1.0, 1.0, 1.0], [0, 0, 1, 0])
    load(2, 16)  # never used
    load(2, 4)  # what lies past its rank is the earlier adapter's
    check([8, 0, 4], [1.0, 1.0, 3.0], [0, 2, 2, 1])
    load(0, 16)
    load(2, 16)
    load(2, 4)  # the same rank as in the step before
    check([16, 0, 4], [0.5, 1.0, 3.0], [0, 2, 2, 1])
    check([16, 0, 4], [2.0, 1.0, 3.0], [0, 0, 0, 0])


def test_values_past_the_rank_may_be_anything(sgl: Any, device: torch.device) -> None:
    made, layer = sgl.backend(2, "fused"), sgl.layer(2, QKV)
    layer.load(0, 16)
    layer.lora_a[1] = float("inf")
    layer.load(1, 3)
    x = torch.randn(2, 64, device=device)
    rows = sgl.begin(made, [0, 1], [16, 3], [1.0, 1.0])
    assert_right(layer, layer.forward(made, x), x, rows, [1.0, 1.0])


def test_shards_are_reduced_once(sgl: Any, device: torch.device) -> None:
    """Two halves of a row-parallel layer sum up to the whole, LoRA part included."""
    whole = sgl.layer(2)
    whole.load(0, 8)
    x = torch.randn(3, 64, device=device)
    outputs: list[Tensor] = []

    def all_reduce(part: Tensor) -> Tensor:
        outputs.append(part)
        return part

    for half in (slice(0, 32), slice(32, 64)):
        made = sgl.backend(2, "fused")
        part = sgl.layer(2, in_features=32, kind="row")
        part.base_layer.weight = whole.base_layer.weight[:, half].contiguous()
        part.load(0, 8)
        part.lora_a[0, :8] = whole.adapters[0][0][:, half]
        part.lora_b[0, :, :8] = whole.adapters[0][1]
        rows = sgl.begin(made, [0, 1, 0], [8, 0], [2.0, 1.0])
        part.forward(made, x[:, half].contiguous(), all_reduce=all_reduce)
    assert len(outputs) == 2
    assert_right(whole, outputs[0] + outputs[1], x, rows, [2.0, 1.0])


def test_other_layers_take_the_own_path(sgl: Any, device: torch.device) -> None:
    made, layer = sgl.backend(2), sgl.layer(2)
    sgl.begin(made, [0, 1], [8, 0], [1.0, 1.0])
    x = torch.randn(2, 64, device=device)
    layer.forward(made, x, kind="embedding")
    layer.forward(made, x, pruned_batch_info=object())
    layer.forward(made, x[None])
    layer.lora_a = layer.lora_a[:, None]  # experts
    layer.forward(made, x)
    assert made.own_calls == [layer] * 4
    assert made.name == "triton_v2"


def test_routing_is_built_once_per_step(
    sgl: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, layers = sgl.backend(2), [sgl.layer(2) for _ in range(3)]
    updates: list[int] = []
    original = Routing.update_

    def update(self: Routing, indices: Tensor) -> Routing:
        updates.append(indices.shape[0])
        return original(self, indices)

    monkeypatch.setattr(Routing, "update_", update)
    x = torch.randn(20, 64, device=device)
    for count in (20, 20, 17):
        sgl.begin(made, [1] * count, [8, 0], [1.0, 1.0])
        for layer in layers:
            layer.forward(made, x[:count])
    assert updates == [20, 20, 17]
    made.reset_routing_cache()
    layers[0].forward(made, x[:17])
    assert updates == [20, 20, 17, 17]
    assert len(made.dense.steps._routings) == 1


def test_rows_past_the_requests_are_base_rows(sgl: Any, device: torch.device) -> None:
    """A graph of four rows replayed for two requests."""
    made, layer = sgl.backend(2, "fused"), sgl.layer(2)
    layer.load(0, 8)
    rows = sgl.begin(made, [0, 0], [8, 0], [1.0, 1.0])
    x = torch.randn(4, 64, device=device)
    assert_right(layer, layer.forward(made, x), x, [*rows, -1, -1], [1.0, 1.0])


def test_inference_mode_may_come_and_go(sgl: Any, device: torch.device) -> None:
    made, layer = sgl.backend(2, "torch"), sgl.layer(2)
    layer.load(0, 8)
    x = torch.randn(2, 64, device=device)
    for mode, scaling in ((True, 1.0), (False, 2.0), (True, 3.0)):
        rows = sgl.begin(made, [0, 1], [8, 0], [scaling, 1.0])
        with torch.inference_mode(mode):
            got = layer.forward(made, x).clone()
        assert_right(layer, got, x, rows, [scaling, 1.0])


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["fused", "triton"])
def test_graph_follows_slots_and_rows(impl: str, sgl: Any, device: torch.device) -> None:
    """Captured before any adapter is there, as SGLang does, and replayed for every mix."""
    sizes = {"slices": (512, 128, 128), "in_features": 1024, "dtype": torch.bfloat16}
    made, layers = sgl.backend(4, impl), [sgl.layer(4, **sizes) for _ in range(2)]
    x = torch.randn(16, 1024, dtype=torch.bfloat16, device=device)
    sgl.begin(made, [3] * 16, [0, 0, 0, 0], [1.0] * 4)
    for _ in range(2):
        made.reset_routing_cache()
        for layer in layers:
            layer.forward(made, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    made.reset_routing_cache()
    with torch.cuda.graph(graph):
        outputs = [layer.forward(made, x) for layer in layers]
    for ranks, slots in (
        ([16, 8, 0, 0], [0, 1, 3] * 5 + [0]),
        ([16, 8, 0, 0], [3] * 16),
        ([3, 8, 16, 0], [0, 2] * 8),
        ([16, 13, 16, 0], [1] * 9),
    ):
        for slot, rank in enumerate(ranks):
            for layer in layers:
                if rank:
                    layer.load(slot, rank)
        scalings = [0.5, 1.0, 2.0, 1.0]
        rows = sgl.begin(made, slots, ranks, scalings)
        rows += [-1] * (16 - len(rows))
        graph.replay()
        torch.cuda.synchronize()
        for layer, output in zip(layers, outputs, strict=True):
            assert_right(layer, output, x, rows, scalings)


@pytest.mark.parametrize("method", ["plain", "doubling"])
def test_kinds_of_layers_are_rehearsed_once(
    method: str, sgl: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first step, and without a trace in it."""
    made = sgl.backend(5, "triton", max_tokens=40)
    rows: list[int] = []
    run = made.dense._run

    def spy(module: Any, layer: Any, x: Tensor, *rest: Any) -> Tensor:
        rows.append(x.shape[0])
        output: Tensor = run(module, layer, x, *rest)
        return output

    monkeypatch.setattr(made.dense, "_run", spy)
    layers = [sgl.layer(5, method=method) for _ in range(2)]
    layers.append(sgl.layer(5, method=method, slices=(32, 16)))
    for layer in layers:
        for slot, rank in enumerate(RANKS):
            if rank:
                layer.load(slot, rank)
    slots = sgl.begin(made, SLOTS, RANKS, SCALINGS, LENGTHS)
    x = torch.randn(len(slots), 64, device=device)
    for layer in layers:
        assert_right(layer, layer.forward(made, x), x, slots, SCALINGS)
    assert rows == [16, 32, 40, len(slots), len(slots), 16, 32, 40, len(slots)]
