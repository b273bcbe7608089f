"""Shrink, base GEMM and expand in one launch: every way to deal the work out, and its counters.

What a rule of the kernel may say is tried on small problems, on CPU and on the GPU; replays,
streams and launches that follow each other closely need the GPU and the shipped rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import loraplex as lp
from loraplex import counters as counters_module
from loraplex import env
from loraplex.bench.verdict import judge
from loraplex.testing import Case, Inputs, build, eager, order_slack, truth, tuning_table

LINEAR = {
    "block_m": 16, "block_n": 32, "block_k": 64, "block_r": 32, "split_k": 1, "is_swapped": 0,
    "has_descriptor": 0, "group_m": 8, "lora_stages": 2, "num_warps": 4, "num_stages": 3,
    "is_single_launch": 1, "has_lora_part": 0, "has_early_b": 0, "expand_at": 8, "lora_steps": 0,
    "prefetch": 64, "is_early": 0,
}  # fmt: skip
SHRINK = {
    "block_r": 32, "block_k": 32, "lanes": 4, "split_k": 1, "num_warps": 4, "num_stages": 2,
}  # fmt: skip

# name, how the base and the adapters are dealt out, split K of the shrink; K = 200 has four blocks
# of 64 and seven of 32
WAYS: tuple[tuple[str, dict[str, int], int], ...] = (
    ("after", {}, 1),
    ("before", {"expand_at": 0, "is_early": 1}, 2),
    ("middle", {"expand_at": 4, "is_swapped": 1}, 4),
    ("parts_2", {"split_k": 2, "is_swapped": 1, "has_descriptor": 1}, 2),
    (
        "parts_2_middle",
        {
            "split_k": 2, "block_k": 32, "expand_at": 4, "lora_steps": 2, "has_descriptor": 1,
            "is_early": 1,
        },
        1,
    ),
    (
        "parts_3_less",
        {"split_k": 3, "block_k": 32, "expand_at": 4, "lora_steps": 4, "block_r": 16},
        2,
    ),
    ("parts_2_none", {"split_k": 2, "lora_steps": 9, "is_swapped": 1}, 1),
    ("parts_3_none", {"split_k": 3, "expand_at": 0, "lora_steps": 9, "has_descriptor": 1}, 2),
    ("parts_6", {"split_k": 6, "lora_steps": 4}, 1),
    ("own", {"has_lora_part": 1}, 4),
    ("own_copied", {"has_lora_part": 1, "has_descriptor": 1, "is_swapped": 1, "is_early": 1}, 1),
    (
        "own_parts_2",
        {"has_lora_part": 1, "split_k": 2, "block_k": 32, "lora_steps": 4, "is_swapped": 1},
        2,
    ),
    (
        "own_parts_3",
        {"has_lora_part": 1, "split_k": 3, "block_k": 32, "expand_at": 4, "has_descriptor": 1},
        2,
    ),
    ("own_parts_3_none", {"has_lora_part": 1, "split_k": 3, "lora_steps": 9, "block_r": 64}, 1),
    ("early", {"has_early_b": 1, "expand_at": 4}, 1),
    ("early_planes", {"has_early_b": 1, "split_k": 2, "is_swapped": 1, "block_r": 16}, 2),
    ("own_early", {"has_lora_part": 1, "has_early_b": 1, "block_r": 16, "has_descriptor": 1}, 4),
)  # fmt: skip
# one with each form of gathering; what they have no descriptors for is odd
SOME_WAYS = ("parts_3_less", "own_parts_2", "early_planes")

MIXED = Case(
    "single_mixed", m=5, k=200, slices=(40, 24), ranks=(8, 24, 0, 16), max_rank=24,
    indices="mixed", rank_multiple=8,
)  # fmt: skip
CASES = (
    Case("single_row", m=1, k=200, slices=(40,), ranks=(8, 24), indices=(1,), rank_multiple=8),
    Case("single_base_row", m=1, k=200, slices=(40,), indices="base", rank_multiple=8),
    Case("single_all_base", m=5, k=128, slices=(40, 8), indices="base", has_bias=True),
    replace(MIXED, name="single_row_blocks", m=40, slices=(24, 8)),
    replace(
        MIXED, name="single_extras", has_bias=True, has_column_scale=True, has_adapter_bias=True
    ),
    Case("single_k_in_one_block", m=3, k=24, slices=(16,), rank_multiple=8),
    Case(
        "single_odd", m=5, k=203, slices=(41, 19), ranks=(3, 24, 0, 1), indices="mixed", x="odd",
        weight="odd", pools="odd", rank_multiple=1,
    ),
    Case(
        "single_absent", m=6, k=72, slices=(24, 8), ranks=((0, 8), (5, 0), 24), table="set",
        has_column_scale=True, has_adapter_bias=True,
    ),
    replace(MIXED, name="single_room_to_spare", m=3, max_tokens=40),
)  # fmt: skip
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CPU_DTYPES = ("fp32", "fp16")


def in_turn(things: tuple[Any, ...]) -> Iterator[Any]:
    """Each thing in every dtype; the interpreter, slow as it is, gets one of its two in turn."""
    for number, thing in enumerate(things):
        for name, dtype in DTYPES.items():
            marks = [] if name == CPU_DTYPES[number % 2] else [pytest.mark.gpu]
            label = "-".join(str(part) for part in thing)
            yield pytest.param(*thing, dtype, id=f"{label}-{name}", marks=marks)


def table_of(way: str) -> dict[str, Any]:
    """A tuning table with one rule for every problem: this way."""
    changes, shrink_split = next(rest for name, *rest in WAYS if name == way)
    assert set(changes) <= set(LINEAR)
    rule = {
        "impl": "fused",
        "shrink": {**SHRINK, "split_k": shrink_split},
        "linear": {**LINEAR, **changes},
    }
    return {"lora_linear": [rule]}


@pytest.mark.parametrize(
    ("way", "case", "dtype"),
    [
        *in_turn(tuple((name, MIXED) for name, *_ in WAYS)),
        *in_turn(tuple((way, case) for case in CASES for way in SOME_WAYS)),
    ],
)
def test_way(
    way: str, case: Case, dtype: torch.dtype, device: torch.device, handed_out: list[Tensor]
) -> None:
    inputs = build(case, dtype, device)
    results = []
    with tuning_table(table_of(way)):
        for calls in (1, 2):
            results.append(inputs.run("lora_linear", "fused"))
            assert len(handed_out) == calls, "each call is one launch that meets on counters"
            assert not handed_out[-1].any(), "counters are zero between launches"
    assert torch.equal(*results), "two calls give the same bits"
    wanted = truth("lora_linear", inputs)
    yardstick = eager("lora_linear", inputs)
    verdict = judge(results[0], yardstick, wanted, slack=order_slack(inputs, wanted))
    assert verdict.is_correct, str(verdict)


@pytest.mark.parametrize("way", ["parts_2_middle", "own_parts_2"])
def test_base_rows_keep_the_bits_of_the_base_layer(way: str, device: torch.device) -> None:
    inputs = build(MIXED, torch.float16, device)
    nobody = lp.Routing.from_indices([-1] * MIXED.m, num_adapters=4, device=device)
    rows = inputs.indices == -1
    assert rows.any()
    with tuning_table(table_of(way)):
        result = inputs.run("lora_linear", "fused")
        base = replace(inputs, routing=nobody).run("lora_linear", "fused")
    assert torch.equal(result[rows], base[rows])
    assert not torch.equal(result, base)


L = 8


class TestShippedRules:
    """A layer of real size in decode, as users call it."""

    pytestmark = pytest.mark.gpu

    @pytest.fixture(autouse=True)
    def _memory_as_it_is(self, _poison: None) -> Iterator[None]:
        """No kernels that fill memory: launches follow each other as they do for users."""
        flags: Any = torch.utils.deterministic
        flags.fill_uninitialized_memory = False
        yield
        flags.fill_uninitialized_memory = True

    @pytest.fixture(params=[1, 16, 64], ids="M{}".format)
    def inputs(self, request: pytest.FixtureRequest, device: torch.device) -> Inputs:
        if env.gpu_arch(0) != "sm_90":
            pytest.skip("only the table of sm_90 has rules for the single launch")
        m = request.param
        # every slot occurs once, so that build() has values for all of them
        case = Case(
            "decode", m=16, k=4096, slices=(4096,), ranks=(16,) * L, max_rank=16,
            indices=(*range(L), *range(L)), rank_multiple=8,
        )  # fmt: skip
        built = build(case, torch.bfloat16, device)
        indices = self.draw(device, 1, m)[0]
        return replace(
            built,
            x=torch.randn(m, 4096, device=device).bfloat16(),
            routing=lp.Routing.from_indices(indices, num_adapters=L),
            indices=indices,
        )

    def draw(self, device: torch.device, *shape: int) -> Tensor:
        return torch.randint(-1, L, shape, dtype=torch.int32, device=device)

    def call(self, inputs: Inputs, x: Tensor | None = None) -> Tensor:
        x = inputs.x if x is None else x
        return lp.lora_linear(x, inputs.weight, inputs.table, inputs.routing)

    def call_thrice(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The first of three layers and the last: nothing runs between their launches."""
        first = self.call(inputs)
        return first, self.call(inputs, self.call(inputs, first))

    def assert_counters_are_zero(self) -> None:
        torch.cuda.synchronize()
        assert counters_module._rows, "calls met on counters"
        for key, row in counters_module._rows.items():
            assert not row.any(), key

    def test_it_is_one_launch(self, inputs: Inputs, handed_out: list[Tensor]) -> None:
        self.call(inputs)
        assert len(handed_out) == 1

    def test_10000_replays(self, inputs: Inputs, device: torch.device) -> None:
        self.call_thrice(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first, last = self.call_thrice(inputs)
        differ = torch.zeros((), dtype=torch.int64, device=device)
        rows = self.draw(device, 10_000, inputs.x.shape[0])
        for number, indices in enumerate(rows):
            inputs.routing.update_(indices)
            graph.replay()
            if number % 50 == 0:
                wanted = self.call_thrice(inputs)
                differ += (first != wanted[0]).any()
                differ += (last != wanted[1]).any()
        self.assert_counters_are_zero()
        assert int(differ) == 0, "a replay gives the bits of a call"
        now = replace(inputs, indices=rows[-1])
        verdict = judge(first, eager("lora_linear", now), truth("lora_linear", now))
        assert verdict.is_correct, str(verdict)

    def test_two_streams_at_once(self, inputs: Inputs, device: torch.device) -> None:
        """The same table and routing; each stream has its own input, and counters."""
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        other = replace(inputs, x=torch.randn_like(inputs.x))
        layers = (inputs, other)
        wanted = [self.call_thrice(layer)[1] for layer in layers]
        differ = torch.zeros(2, dtype=torch.int64, device=device)
        torch.cuda.synchronize()
        for _ in range(200):
            for number, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    last = self.call_thrice(layers[number])[1]
                    differ[number] += (last != wanted[number]).any()
        self.assert_counters_are_zero()
        assert differ.tolist() == [0, 0]
        for layer in layers:
            verdict = judge(
                self.call(layer), eager("lora_linear", layer), truth("lora_linear", layer)
            )
            assert verdict.is_correct, str(verdict)

    def test_no_host_synchronisation(self, inputs: Inputs) -> None:
        self.call(inputs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.call(inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        self.assert_counters_are_zero()

    def test_runs_give_the_same_bits(self, inputs: Inputs) -> None:
        first, last = self.call_thrice(inputs)
        for _ in range(100):
            again = self.call_thrice(inputs)
            assert torch.equal(again[0], first)
            assert torch.equal(again[1], last)
