"""Every kernel gives the same answer however its work is cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import torch

import loraplex as lp
from loraplex.bench.verdict import judge
from loraplex.errors import UnsupportedImplError
from loraplex.ops.impls import TRITON_IMPLS
from loraplex.testing import GENERAL_IMPLS, Case, build, changed_blocks, eager, truth

CASES = (
    Case("aligned", m=20, k=72, slices=(40, 24), ranks=(8, 24, 16), indices="mixed"),
    Case(
        "odd", m=20, k=73, slices=(40, 23), ranks=(3, 24, 17), indices="mixed", x="odd",
        has_bias=True, has_column_scale=True, has_adapter_bias=True,
    ),
    Case("odd_delta", m=20, k=73, slices=(40, 23), ranks=(3, 24, 17), indices="mixed", x="odd"),
    Case("tiles", m=140, k=40, slices=(24,), ranks=(8, 16), indices="mixed"),
)  # fmt: skip

# Keys that a kernel does not have are passed over; a new way to cut is a row.
CUTS: Mapping[str, Mapping[str, int]] = {
    "smallest": {"block_m": 16, "block_n": 16, "block_k": 16, "block_r": 16},
    "largest": {"block_m": 128, "block_n": 128, "block_k": 128, "block_r": 128},
    "split_3": {"split_k": 3, "block_k": 16},
    "split_past_the_end": {"split_k": 8, "block_k": 64},
    "split_swapped": {"split_k": 2, "block_k": 32, "is_swapped": 1, "block_n": 16},
    "swapped": {"is_swapped": 1, "block_m": 16},
    "not_swapped": {"is_swapped": 0, "block_n": 16},
    "group_1": {"group_m": 1, "block_m": 16, "block_n": 16},
    "group_2": {"group_m": 2, "block_m": 16, "block_n": 16},
    "descriptor": {"has_descriptor": 1, "block_n": 16, "block_k": 32},
    "descriptor_split": {"has_descriptor": 1, "split_k": 2, "block_k": 64, "is_swapped": 1},
    "lanes_1": {"lanes": 1, "block_r": 32},
    "lanes_2": {"lanes": 2, "block_k": 16, "split_k": 2},
}


# What costs the interpreter most, or has the fewest ways to be cut.
FEW = ("smallest", "largest", "split_3")
LEAST = ("smallest", "largest")


def cuts(impl: str, case: Case) -> Iterable[str]:
    if impl == "one_launch":
        return LEAST
    if case.name == "tiles":
        return FEW
    # tensor descriptors are for aligned rows; the tables see to that
    return [cut for cut in CUTS if case.name == "aligned" or not cut.startswith("descriptor")]


@pytest.mark.parametrize(
    ("op", "impl", "case", "cut"),
    [
        pytest.param(op, impl, case, cut, id=f"{op}-{impl}-{case}-{cut}")
        for op, impls in TRITON_IMPLS.items()
        if op != "matmul"
        for impl in impls
        for case in CASES
        if case.concerns(op)
        for cut in cuts(impl, case)
    ],
)
def test_cut(op: str, impl: str, case: Case, cut: str, device: torch.device) -> None:
    inputs = build(case, torch.float16, device)
    with changed_blocks(lambda config: {key: CUTS[cut].get(key, config[key]) for key in config}):
        try:
            result = inputs.run(op, impl)
        except UnsupportedImplError as refusal:
            if impl in GENERAL_IMPLS:
                raise
            pytest.skip(str(refusal))
    verdict = judge(result, eager(op, inputs), truth(op, inputs))
    assert verdict.is_correct, str(verdict)


@pytest.mark.parametrize("cut", CUTS)
def test_cut_products(cut: str, device: torch.device) -> None:
    # float32 products of the largest blocks are unrolled into plain sums: minutes to compile
    shapes = ((70, 73), (73, 40), (70, 20), (20, 40))
    x, c, y, b = (torch.randn(*shape, dtype=torch.float16, device=device) for shape in shapes)
    with changed_blocks(lambda config: {key: CUTS[cut].get(key, config[key]) for key in config}):
        result = lp.fused_matmul_expand(x, c, y, b, impl="tiles")
    verdict = judge(result, x @ c + y @ b, x.double() @ c.double() + y.double() @ b.double())
    assert verdict.is_correct, str(verdict)


def test_cuts_reach_the_kernels(device: torch.device) -> None:
    def warps() -> int:
        explanation = lp.explain(
            "matmul", m=1, k=1, slices=[1], dtype=torch.float16, device=device, impl="tiles"
        )
        return explanation.choice.configs["matmul"]["num_warps"]

    with changed_blocks(lambda config: {**config, "num_warps": 16}):
        assert warps() == 16
    assert warps() != 16
