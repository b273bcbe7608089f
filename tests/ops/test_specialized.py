"""The launch with warps of its own for the adapters: every way to deal it out, graphs, early reads.

It is written for Hopper in Gluon, which Triton's interpreter does not run: without such a GPU only
its refusals are tested. Replays, streams and back to back launches of the shipped rules are in
test_single_launch.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

import loraplex as lp
from loraplex import env
from loraplex.bench.verdict import judge
from loraplex.counters import EXCHANGE_HEADER, PER_STREAM, counters_of
from loraplex.testing import Case, Inputs, build, eager, order_slack, truth, tuning_table

MOST_LAUNCHES = 255
SHRINK = {"block_r": 16, "block_k": 64, "split_k": 1}
LINEAR = {
    "is_specialized": 1, "block_m": 64, "block_n": 64, "block_k": 64, "block_r": 32, "split_k": 1,
    "lora_steps": 0, "lora_stages": 2, "occupancy": 1, "num_warps": 4, "num_stages": 3,
}  # fmt: skip

# name, changes of the linear part and of the shrink's; of the 20 blocks of 64 in K = 1224 the last
# one has 8 columns, of the 5 steps of four strips of 64 the last one has not all of its strips
WAYS: tuple[tuple[str, dict[str, int], dict[str, int]], ...] = (
    ("plain", {}, {}),
    ("parts_2", {"split_k": 2, "block_k": 128, "num_stages": 4}, {"split_k": 4}),
    ("parts_3", {"split_k": 3, "block_n": 128, "lora_stages": 1}, {"split_k": 2, "block_k": 128}),
    ("parts_2_more", {"split_k": 2, "lora_steps": -4}, {"split_k": 2}),
    ("parts_2_none", {"split_k": 2, "lora_steps": 40}, {"split_k": 2}),
    ("parts_3_all", {"split_k": 3, "lora_steps": -60}, {}),
    ("parts_7", {"split_k": 7, "block_k": 128}, {"split_k": 2}),
    ("short", {"block_m": 16, "num_stages": 8}, {}),
    ("short_parts", {"block_m": 32, "split_k": 2, "block_n": 128}, {"split_k": 3}),
    ("wide", {"block_n": 256, "num_warps": 8}, {"split_k": 2}),
    ("two", {"block_n": 128, "occupancy": 2, "lora_stages": 1}, {"split_k": 8}),
    ("two_parts", {"occupancy": 2, "split_k": 2, "num_stages": 4}, {"block_k": 128}),
    ("more_ranks", {"block_r": 64}, {"block_r": 32}),
    ("all_ranks", {"block_r": 128, "lora_stages": 3}, {"block_r": 64, "split_k": 2}),
)
SOME_WAYS = ("parts_2", "two", "wide")

MIXED = Case(
    "specialized_mixed", m=5, k=1224, slices=(136, 72), ranks=(8, 24, 0, 16), max_rank=24,
    indices="mixed", rank_multiple=8,
)  # fmt: skip
CASES = (
    Case("spec_row", m=1, k=1224, slices=(136,), ranks=(8, 24), indices=(1,), rank_multiple=8),
    Case("spec_base_row", m=1, k=1224, slices=(136,), indices="base", rank_multiple=8),
    Case("spec_all_base", m=5, k=512, slices=(40, 8), indices="base", has_bias=True),
    replace(MIXED, name="spec_row_blocks", m=40, max_tokens=100),
    replace(MIXED, name="spec_row_tiles", m=150),
    replace(MIXED, name="spec_extras", has_bias=True, has_column_scale=True, has_adapter_bias=True),
    Case("spec_k_in_one_block", m=3, k=24, slices=(16,), rank_multiple=8),
    Case("spec_k_in_one_vector", m=3, k=8, slices=(8, 8, 8), rank_multiple=8),
    Case(
        "spec_absent", m=6, k=72, slices=(24, 8), ranks=((0, 8), (8, 0), 24), table="set",
        has_column_scale=True, has_adapter_bias=True, rank_multiple=8,
    ),
    Case(
        "spec_many", m=64, k=512, slices=(264,), ranks=(64, 8, 128) * 20, max_rank=128,
        indices="uniform", rank_multiple=8,
    ),
    Case("spec_odd_rows_apart", m=9, k=512, slices=(72,), x="wide", weight="wide", rank_multiple=8),
    replace(MIXED, name="spec_room_to_spare", m=3, max_tokens=40),
)  # fmt: skip


def table_of(way: str, max_rank: int = 32) -> dict[str, Any]:
    """A tuning table with one rule for every problem: this way, or with room for so many ranks."""
    changes, shrink = next(rest for name, *rest in WAYS if name == way)
    assert set(changes) <= set(LINEAR)
    linear = {**LINEAR, **changes}
    if max_rank > linear["block_r"]:
        linear |= {"block_r": max_rank, "lora_stages": 1}
    rule = {"impl": "fused", "shrink": {**SHRINK, **shrink}, "linear": linear}
    return {"lora_linear": [rule]}


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    if env.gpu_arch(0) != "sm_90":
        pytest.skip("the launch with warps for the adapters is written for Hopper")
    return device


def assert_right(inputs: Inputs, result: Tensor) -> None:
    wanted = truth("lora_linear", inputs)
    yardstick = eager("lora_linear", inputs)
    verdict = judge(result, yardstick, wanted, slack=order_slack(inputs, wanted))
    assert verdict.is_correct, str(verdict)


def replayed(call: Any, times: int = 3) -> list[Tensor]:
    """What a captured call gives at each replay, the last output overwritten with NaN before."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # the second launch begins while the first one runs
        call()
        y = call()
    results = []
    for _ in range(times):
        y.fill_(float("nan"))
        graph.replay()
        results.append(y.clone())
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("way", "case"),
    [
        *((name, MIXED) for name, *_ in WAYS),
        *((way, case) for case in CASES for way in SOME_WAYS),
    ],
    ids=str,
)
def test_way(
    way: str, case: Case, dtype: torch.dtype, hopper: torch.device, handed_out: list[Tensor]
) -> None:
    inputs = build(case, dtype, hopper)
    with tuning_table(table_of(way, inputs.table.max_rank)):
        first = inputs.run("lora_linear", "fused")
        assert len(handed_out) == 1, "a call is one launch that meets on counters"
        assert not handed_out[-1].any(), "counters are zero between launches"
        again = replayed(lambda: inputs.run("lora_linear", "fused"))
    assert not handed_out[-1].any()
    for result in again:
        assert torch.equal(result, first), "a replay that reads early gives the bits of a call"
    assert_right(inputs, first)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["parts_2", "two"])
def test_base_rows_keep_the_bits_of_the_base_layer(way: str, hopper: torch.device) -> None:
    inputs = build(MIXED, torch.float16, hopper)
    nobody = lp.Routing.from_indices([-1] * MIXED.m, num_adapters=4, device=hopper)
    rows = inputs.indices == -1
    assert rows.any()
    with tuning_table(table_of(way)):
        result = inputs.run("lora_linear", "fused")
        base = replace(inputs, routing=nobody).run("lora_linear", "fused")
    assert torch.equal(result[rows], base[rows])
    assert not torch.equal(result, base)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["plain", "parts_2", "two", "wide"])
def test_who_waits_in_vain_computes_the_shares_itself(
    way: str, hopper: torch.device, handed_out: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("loraplex.kernels.specialized")
    inputs = build(replace(MIXED, name="spec_in_vain", m=40), torch.bfloat16, hopper)
    with tuning_table(table_of(way)):
        waited = inputs.run("lora_linear", "fused")
        monkeypatch.setattr(module, "MOST_POLLS", 0)
        for result in (
            inputs.run("lora_linear", "fused"),
            *replayed(lambda: inputs.run("lora_linear", "fused"), 20),
        ):
            assert torch.equal(result, waited)
    assert not handed_out[-1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["parts_2", "wide"])
def test_launches_are_numbered_anew_now_and_then(way: str, hopper: torch.device) -> None:
    """The words that programs leave for each other carry 8 bits of the launch's number."""
    few = replace(MIXED, name="spec_few", m=40, ranks=(8, 8, 0, 16))
    both = [
        build(case, torch.bfloat16, hopper)
        for case in (replace(MIXED, name="spec_more", m=40), few)
    ]
    with tuning_table(table_of(way)):
        wanted = [inputs.run("lora_linear", "fused") for inputs in both]
        row = counters_of(hopper, 1)
        number, words = row[PER_STREAM], row[PER_STREAM + EXCHANGE_HEADER :]
        assert words.any()
        number.fill_(MOST_LAUNCHES - 1)
        assert torch.equal(both[0].run("lora_linear", "fused"), wanted[0])
        assert not number
        assert not words.any(), "what the next launches with these numbers would take for theirs"
        for call in range(2 * MOST_LAUNCHES + 3):
            assert int(number) == call % MOST_LAUNCHES
            assert torch.equal(both[call % 2].run("lora_linear", "fused"), wanted[call % 2]), call


@triton.jit
def write_late_kernel(target_ptr, source_ptr, size, WAIT_NS: tl.constexpr, BLOCK: tl.constexpr):
    """Lets its successor begin, waits, and then writes."""
    gdc_wait()
    gdc_launch_dependents()
    start = globaltimer()
    while globaltimer() - start < WAIT_NS:
        pass
    for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < size), mask=at < size)


def write_late(target: Tensor, source: Tensor) -> None:
    """As a kernel of somebody else may write, and say so to torch."""
    torch.autograd.graph.increment_version(target)
    # few programs, beside which the successor has room
    write_late_kernel[(32,)](
        target, source, target.numel(), WAIT_NS=50_000, BLOCK=1024, launch_pdl=True
    )


def always(*_: Tensor) -> bool:
    return True


@pytest.mark.gpu
class TestWritesInAGraph:
    """What a kernel writes right before a launch reaches it, although launches read early."""

    @pytest.fixture(autouse=True)
    def _memory_as_it_is(self, _poison: None) -> Iterator[None]:
        """No kernels that fill memory: nothing comes between a write and a launch."""
        flags: Any = torch.utils.deterministic
        flags.fill_uninitialized_memory = False
        yield
        flags.fill_uninitialized_memory = True

    @pytest.fixture
    def inputs(self, hopper: torch.device) -> Iterator[Inputs]:
        case = Case(
            "spec_writes", m=48, k=2048, slices=(1024,), ranks=(16,) * 8, max_rank=16,
            indices="uniform", rank_multiple=8,
        )  # fmt: skip
        with tuning_table(table_of("parts_2")):
            yield build(case, torch.bfloat16, hopper)

    def test_routing(self, inputs: Inputs, hopper: torch.device) -> None:
        routing = inputs.routing
        source = inputs.indices.clone()
        inputs.run("lora_linear", "fused")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            before = inputs.run("lora_linear", "fused")
            routing.update_(source)
            after = inputs.run("lora_linear", "fused")
        for number in range(200):
            old = source.clone()
            source.copy_(torch.randint(-1, 8, source.shape, device=hopper))
            graph.replay()
            if number:
                routing.update_(old)
                assert torch.equal(before, inputs.run("lora_linear", "fused")), number
            routing.update_(source)
            assert torch.equal(after, inputs.run("lora_linear", "fused")), number

    @pytest.mark.parametrize("what", ["weight", "b_pool"])
    def test_operand(self, inputs: Inputs, what: str) -> None:
        own = inputs.weight if what == "weight" else inputs.table.storages[1]
        assert own.numel() > 100_000
        first, second = own.clone(), own.flip(0).contiguous()
        wanted = []
        for value in (first, second):
            own.copy_(value)
            wanted.append(inputs.run("lora_linear", "fused"))
        assert not torch.equal(*wanted)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            write_late(own, first)
            one = inputs.run("lora_linear", "fused")
            write_late(own, second)
            other = inputs.run("lora_linear", "fused")
        for _ in range(50):
            graph.replay()
            assert torch.equal(one, wanted[0])
            assert torch.equal(other, wanted[1])

    def test_it_takes_the_wait(self, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
        """The other tests of this class could fail: a launch that only believes it may reads late
        writes too early."""
        own = inputs.weight
        first, second = own.clone(), own.flip(0).contiguous()
        own.copy_(second)
        wanted = inputs.run("lora_linear", "fused")
        own.copy_(first)
        monkeypatch.setattr(importlib.import_module("loraplex.ops.fused"), "are_settled", always)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            write_late(own, second)
            y = inputs.run("lora_linear", "fused")
        graph.replay()
        assert not torch.equal(y, wanted)


def test_refused_without_hopper(device: torch.device) -> None:
    if device.type == "cuda" and env.gpu_arch(0) == "sm_90":
        pytest.skip("runs here")
    inputs = build(MIXED, torch.float16, device)
    with (
        tuning_table(table_of("plain")),
        pytest.raises(lp.UnsupportedImplError, match="is_specialized needs an sm_90 GPU, got"),
    ):
        inputs.run("lora_linear", "fused")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "float16 or bfloat16, got torch.float32"),
        ({"x": "odd", "weight": "odd"}, "rows of x and weight that are dense"),
        ({"ranks": (3, 24, 0, 16), "rank_multiple": 1}, "rank_multiple 8"),
        ({"ranks": (8, 40), "max_rank": 40}, "block_r of at least max_rank, .* got 32 and 40"),
        ({"m": 6000, "ranks": (8, 24)}, "of at most 262144, got 288000"),
    ],
    ids=["dtype", "rows", "ranks", "more_ranks", "words"],
)
def test_refused(change: dict[str, Any], message: str, hopper: torch.device) -> None:
    dtype = change.pop("dtype", torch.float16)
    inputs = build(replace(MIXED, name="spec_refused", **change), dtype, hopper)
    with (
        tuning_table(table_of("plain")),
        pytest.raises(lp.UnsupportedImplError, match=message),
    ):
        inputs.run("lora_linear", "fused")


def test_rules_may_ask_for_the_warps_that_the_kernel_has() -> None:
    module = importlib.import_module("loraplex.kernels.specialized")
    rules = importlib.import_module("loraplex.tuning.choose")
    assert set(module.ADAPTER_REGISTERS) == set(rules.WARPS)
