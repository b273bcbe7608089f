"""The shrink that takes all slices of an item at once: same answers, however its work is cut."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from loraplex.bench.verdict import judge
from loraplex.kernels import shrink_wide
from loraplex.ops.kept import nothing_kept
from loraplex.testing import Case, build, eager, order_slack, truth, tuning_table

SHRINK = {
    "is_wide": 1, "block_r": 64, "block_k": 32, "lanes": 1, "split_k": 1, "num_warps": 4,
    "num_stages": 3,
}  # fmt: skip
LINEAR = {
    "block_m": 64, "block_n": 32, "block_k": 32, "block_r": 32, "split_k": 1, "is_swapped": 0,
    "has_descriptor": 0, "group_m": 8, "lora_stages": 2, "num_warps": 4, "num_stages": 2,
}  # fmt: skip
EXPAND = {
    "block_m": 64, "block_n": 32, "block_r": 32, "lora_stages": 2, "num_warps": 4, "num_stages": 2,
}  # fmt: skip

# K = 200 has seven blocks of 32 and one of 256; v has 48 columns
CUTS: Mapping[str, Mapping[str, int]] = {
    "whole": {},
    "narrow": {"block_r": 16},
    "split_2": {"split_k": 2},
    "narrow_split_4": {"block_r": 16, "split_k": 4, "block_k": 16},
    "split_past_the_end": {"split_k": 2, "block_k": 256},
    "long": {"block_k": 128, "num_warps": 8, "num_stages": 2},
}
MIXED = Case(
    "wide_mixed", m=140, k=200, slices=(24, 16), ranks=(8, 24, 0, 16), max_rank=24,
    indices="mixed",
)  # fmt: skip
ODD = replace(
    MIXED, name="wide_odd", k=203, slices=(25, 15), ranks=(3, 24, 17), x="odd", pools="odd"
)
CASES = (
    Case("wide_row", m=1, k=72, slices=(24, 8, 8), indices=(1,)),
    Case("wide_base_row", m=1, k=72, slices=(24,), indices="base"),
    Case("wide_all_base", m=70, k=40, slices=(24, 8), indices="base"),
    Case("wide_small_items", m=40, k=72, slices=(24, 8), ranks=(8, 24), indices="mixed"),
    Case("wide_tile_to_spare", m=3, k=72, max_tokens=200, indices=(2, -1, 2)),
    Case("wide_one_adapter", m=260, k=40, slices=(16, 8), ranks=(16,), indices="identical"),
    Case("wide_ranks_0", m=70, k=40, slices=(24,), ranks=(0, 0), max_rank=8),
    Case("wide_ranks_1", m=70, k=40, slices=(24, 8), ranks=(1, 1), max_rank=1),
    Case("wide_ranks_far", m=70, k=40, slices=(16,), ranks=(4, 256, 100), max_rank=256),
    Case("wide_stepped", m=70, k=40, slices=(16, 8), x="stepped", pools="stepped"),
    Case("wide_transposed", m=70, k=40, slices=(16, 8), x="transposed", pools="transposed"),
    Case("wide_expanded", m=70, k=40, slices=(16, 8), x="expanded"),
    Case("wide_not_vectors", m=70, k=40, slices=(16, 8), ranks=(8, 16), rank_multiple=1),
    Case(
        "wide_absent_slices", m=70, k=72, slices=(24, 8, 8), ranks=((0, 8, 0), (5, 0, 0), 24),
        table="set", has_column_scale=True, has_adapter_bias=True,
    ),
)  # fmt: skip
WAYS = (
    ("lora_linear", "fused"),
    ("lora_linear", "gemm_add"),
    ("add_lora", "shrink_expand"),
    ("multi_lora", "shrink_expand"),
)
DTYPES = {"fp16": torch.float16, "fp32": torch.float32, "bf16": torch.bfloat16}
CPU_DTYPES = ("fp16", "fp32")


def problems() -> Iterator[Any]:
    """Every way on every case, the first of them in every cut; the CPU takes dtypes in turn."""
    tried = [
        *((way, case, cut) for cut in CUTS for case in (MIXED, ODD) for way in WAYS),
        *((way, case, cut) for case in CASES for cut in ("whole", "split_2") for way in WAYS),
    ]
    for number, ((op, impl), case, cut) in enumerate(tried):
        for name, dtype in DTYPES.items():
            if case.concerns(op):
                is_slow = name != CPU_DTYPES[(number + number // len(WAYS)) % 2]
                marks = [pytest.mark.gpu] if is_slow else []
                yield pytest.param(
                    op, impl, case, cut, dtype, marks=marks, id=f"{op}-{impl}-{case}-{cut}-{name}"
                )


def table_of(cut: str) -> dict[str, Any]:
    """A tuning table in which everything shrinks this way."""
    shrink = {**SHRINK, **CUTS[cut]}
    table: dict[str, Any] = {}
    for op, impl in WAYS:
        other = {"linear": LINEAR} if impl == "fused" else {"expand": EXPAND}
        table.setdefault(op, []).append({"impl": impl, "shrink": shrink, **other})
    return table


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Columns of v in each launch of the wide shrink."""
    found: list[int] = []
    launch: Callable[..., None] = shrink_wide.launch_shrink_wide

    def record(*args: Any, **kwargs: Any) -> None:
        found.append(args[5].shape[2] * args[5].shape[3])
        launch(*args, **kwargs)

    monkeypatch.setattr(shrink_wide, "launch_shrink_wide", record)
    # a repeated call would not come by here
    with nothing_kept():
        yield found


@pytest.mark.parametrize(("op", "impl", "case", "cut", "dtype"), list(problems()))
def test_cut(
    op: str,
    impl: str,
    case: Case,
    cut: str,
    dtype: torch.dtype,
    device: torch.device,
    launches: list[int],
) -> None:
    inputs = build(case, dtype, device)
    with tuning_table(table_of(cut)):
        result, again = inputs.run(op, impl), inputs.run(op, impl)
    assert len(launches) == 2
    assert torch.equal(result, again), "two calls give the same bits"
    wanted = truth(op, inputs)
    verdict = judge(result, eager(op, inputs), wanted, slack=order_slack(inputs, wanted))
    assert verdict.is_correct, str(verdict)


@pytest.mark.parametrize("programs", [1, 2, 3])
@pytest.mark.parametrize("case", [MIXED, CASES[5]], ids=str)
def test_programs_share_the_items_of_a_tile(
    programs: int, case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of the first case has five items, one of the other two."""
    inputs = build(case, torch.float16, device)
    with tuning_table(table_of("split_2")):
        wanted = inputs.run("lora_linear", "fused")
        monkeypatch.setattr(shrink_wide, "PROGRAMS", 0)
        monkeypatch.setattr(shrink_wide, "LEAST_PROGRAMS_OF_TILE", programs)
        assert torch.equal(inputs.run("lora_linear", "fused"), wanted)


def test_only_rules_that_say_so_shrink_this_way(device: torch.device, launches: list[int]) -> None:
    inputs = build(CASES[0], torch.float16, device)
    table = table_of("whole")
    for rules in table.values():
        for rule in rules:
            rule["shrink"] = {**rule["shrink"], "is_wide": 0}
    with tuning_table(table):
        inputs.run("lora_linear", "fused")
    assert launches == []


def test_counters_are_reset(device: torch.device) -> None:
    """K of the base GEMM in two parts: its programs meet on counters that the shrink zeroes."""
    inputs = build(MIXED, torch.float16, device)
    table = table_of("whole")
    table["lora_linear"][0]["linear"] = {**LINEAR, "split_k": 2}
    with tuning_table(table):
        result = inputs.run("lora_linear", "fused")
    verdict = judge(result, eager("lora_linear", inputs), truth("lora_linear", inputs))
    assert verdict.is_correct, str(verdict)


def test_rules_of_the_single_launch_cannot_have_it() -> None:
    module = importlib.import_module("loraplex.tuning.choose")
    rule = {"impl": "fused", "shrink": SHRINK, "linear": {**LINEAR, "is_single_launch": 1}}
    with pytest.raises(module.LoraplexError, match="rule 0 of lora_linear in t: .* is_wide"):
        module.check_table("t", {"lora_linear": [rule]})
