"""The two launches: every way of a rule to ask for B and v early and to halve the last wave."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from loraplex.bench.verdict import judge
from loraplex.ops.impls import count_at_a_time
from loraplex.testing import Case, build, eager, order_slack, truth, tuning_table

SHRINK = {
    "block_r": 32, "block_k": 32, "lanes": 4, "split_k": 1, "num_warps": 4, "num_stages": 2,
}  # fmt: skip
LINEAR = {
    "block_m": 16, "block_n": 32, "block_k": 64, "block_r": 16, "split_k": 1, "is_swapped": 0,
    "has_descriptor": 0, "group_m": 2, "lora_stages": 2, "num_warps": 4, "num_stages": 3,
    "has_early_b": 0, "halves_tail": 0,
}  # fmt: skip
WAYS: dict[str, dict[str, int]] = {
    "plain": {},
    "early": {"has_early_b": 1},
    "early_wide": {"has_early_b": 1, "block_r": 64, "is_swapped": 1, "has_descriptor": 1},
    "halves": {"halves_tail": 1, "block_n": 64},
    "early_halves": {"has_early_b": 1, "halves_tail": 1, "is_swapped": 1, "block_k": 32},
}
PLANES = {"plain": 2, "early": 1, "early_wide": 2, "halves": 4, "early_halves": 1}

# 3 programs at a time in the interpreter: row blocks times column blocks leave one or none over
MIXED = Case(
    "ways_mixed", m=20, k=200, slices=(40, 24), ranks=(8, 24, 0, 16), max_rank=24,
    indices="mixed", rank_multiple=8, has_bias=True,
)  # fmt: skip
CASES = (
    MIXED,
    replace(MIXED, name="ways_one_tile", m=5, slices=(24,)),
    replace(MIXED, name="ways_extras", has_column_scale=True, has_adapter_bias=True),
    Case("ways_base", m=20, k=128, slices=(40, 24), indices="base"),
    Case(
        "ways_odd", m=21, k=203, slices=(41, 19), ranks=(3, 24, 0, 1), indices="mixed", x="odd",
        weight="odd", pools="odd", rank_multiple=1,
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, id="fp32"),
        pytest.param(torch.float16, id="fp16"),
        pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.gpu),
    ],
)
def test_way(way: str, case: Case, dtype: torch.dtype, device: torch.device) -> None:
    linear = {**LINEAR, **WAYS[way]}
    if linear["has_descriptor"] and (dtype == torch.float32 or case.rank_multiple == 1):
        linear["has_descriptor"] = 0
    rule = {"impl": "fused", "shrink": {**SHRINK, "split_k": PLANES[way]}, "linear": linear}
    inputs = build(case, dtype, device)
    with tuning_table({"lora_linear": [rule]}):
        results = [inputs.run("lora_linear", "fused") for _ in range(2)]
    assert torch.equal(*results), "two calls give the same bits"
    wanted = truth("lora_linear", inputs)
    slack = order_slack(inputs, wanted)
    verdict = judge(results[0], eager("lora_linear", inputs), wanted, slack=slack)
    assert verdict.is_correct, str(verdict)


@pytest.mark.parametrize(
    ("tiles", "halves_tail", "whole"),
    [(1, 1, 0), (3, 1, None), (4, 1, 3), (5, 1, None), (7, 1, 6), (4, 0, None)],
)
def test_only_a_last_wave_that_fits_is_halved(
    tiles: int, halves_tail: int, whole: int | None
) -> None:
    assert count_at_a_time(torch.device("cpu"), 8) == 3
    # the package has a function of the module's name
    module: Any = importlib.import_module("loraplex.ops.fused")
    config = {"halves_tail": halves_tail, "num_warps": 8}
    assert module.whole_tiles(tiles, config, torch.device("cpu")) == whole
