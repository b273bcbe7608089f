"""Every case on every implementation of every routed op, against float64.

A result passes when its largest error is at most twice that of eager torch in the same dtype, plus
one rounding. The same bodies run on the GPU, with bfloat16 and the layers of real models.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import loraplex as lp
from loraplex.bench.verdict import judge
from loraplex.errors import UnsupportedImplError
from loraplex.ops.impls import TRITON_IMPLS
from loraplex.testing import CASES, GENERAL_IMPLS, OPS, Case, Inputs, build, eager, truth

GPU = pytest.mark.gpu
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def implementations(op: str) -> tuple[str, ...]:
    return ("torch", *TRITON_IMPLS[op])


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def problems(names: set[str] | None = None, dtypes: str = "fp32 fp16 bf16") -> list[object]:
    """Op, implementation, dtype and case; what the interpreter cannot do is for the GPU only."""
    return [
        pytest.param(
            op,
            impl,
            DTYPES[dtype],
            case,
            id=f"{op}-{impl}-{dtype}-{case}",
            marks=[GPU] if case.is_large or (dtype == "bf16" and impl != "torch") else [],
        )
        for op in OPS
        for impl in implementations(op)
        for dtype in dtypes.split()
        for case in CASES
        if case.concerns(op) and (names is None or case.name in names)
    ]


def run(inputs: Inputs, op: str, impl: str) -> Tensor:
    """The result; a special implementation may say why it does not take this problem."""
    try:
        return inputs.run(op, impl)
    except UnsupportedImplError as refusal:
        if impl in GENERAL_IMPLS:
            raise
        if impl not in str(refusal):
            pytest.fail(f"a refusal names the implementation ({impl}): {refusal}")
        pytest.skip(str(refusal))


def assert_passes(result: Tensor, op: str, inputs: Inputs) -> None:
    expected = truth(op, inputs)
    assert result.shape == expected.shape
    assert result.dtype == inputs.x.dtype
    assert result.device == inputs.x.device
    if result.numel():
        verdict = judge(result, eager(op, inputs), expected)
        assert verdict.is_correct, str(verdict)


@pytest.mark.parametrize(("op", "impl", "dtype", "case"), problems())
def test_result(op: str, impl: str, dtype: torch.dtype, case: Case, device: torch.device) -> None:
    inputs = build(case, dtype, device)
    assert_passes(run(inputs, op, impl), op, inputs)


SOME = {"some_base", "everything", "tiles_2", "slices_odd"}


@pytest.mark.parametrize(("op", "impl", "dtype", "case"), problems(SOME, "fp16"))
def test_base_rows_keep_the_bits_of_the_base_layer(
    op: str, impl: str, dtype: torch.dtype, case: Case, device: torch.device
) -> None:
    inputs = build(case, dtype, device)
    base = replace(
        inputs,
        routing=type(inputs.routing).from_indices(
            [-1] * case.m, num_adapters=len(case.ranks), device=device
        ),
        indices=torch.full_like(inputs.indices, -1),
    )
    rows = inputs.indices.to(device) == -1
    assert rows.any()
    result = run(inputs, op, impl)
    assert torch.equal(result[rows], run(base, op, impl)[rows])
    if op == "multi_lora":
        assert not result[rows].any()
    if op == "add_lora":
        assert torch.equal(result[rows], inputs.y[rows])


@pytest.mark.parametrize(
    ("op", "impl", "dtype", "case"), problems({"ranks_mixed", "tiles_2"}, "fp16")
)
def test_two_runs_give_the_same_bits(
    op: str, impl: str, dtype: torch.dtype, case: Case, device: torch.device
) -> None:
    inputs = build(case, dtype, device)
    assert torch.equal(run(inputs, op, impl), run(inputs, op, impl))


@pytest.mark.usefixtures("shipped_tables")
@pytest.mark.parametrize(("op", "impl", "dtype", "case"), problems({"slices_odd"}, "fp32 fp16"))
def test_shipped_block_sizes(
    op: str, impl: str, dtype: torch.dtype, case: Case, device: torch.device
) -> None:
    inputs = build(case, dtype, device)
    assert_passes(run(inputs, op, impl), op, inputs)


@pytest.mark.parametrize("impl", implementations("lora_linear"))
def test_a_cleared_slot_is_the_base_layer(impl: str, device: torch.device) -> None:
    """S07: nothing stays of the adapter that was there, whatever its rank."""
    inputs = build(named("set_rank_multiple_8"), torch.float16, device)
    rows = (inputs.indices == 2).to(device)
    adapted = run(inputs, "lora_linear", impl)
    inputs.table.clear_(2)
    cleared = run(inputs, "lora_linear", impl)
    base = torch.nn.functional.linear(inputs.x.double(), inputs.weight.double())
    torch.testing.assert_close(cleared[rows].double(), base[rows], rtol=2e-3, atol=2e-3)
    assert not torch.isclose(adapted[rows], cleared[rows]).all(dim=1).any()
    assert torch.equal(adapted[~rows], cleared[~rows])


@pytest.mark.parametrize("impl", implementations("lora_linear"))
def test_routing_for_fewer_slots_than_the_table_has(impl: str, device: torch.device) -> None:
    inputs = build(named("slices_3"), torch.float16, device)
    rows = [1, 0, -1, 1, 0, 0, -1]
    of_all = lp.Routing.from_indices(rows, num_adapters=3, device=device)
    of_two = lp.Routing.from_indices(rows, num_adapters=2, device=device)
    results = [
        run(replace(inputs, routing=routing), "lora_linear", impl) for routing in (of_all, of_two)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("impl", implementations("multi_lora"))
def test_four_tokens(impl: str, device: torch.device) -> None:
    """The example that people learn first; lists are as good as tensors."""
    x = torch.randn(4, 128, device=device)
    a, b = torch.randn(3, 16, 128, device=device), torch.randn(3, 256, 16, device=device)
    indices = [2, 0, 1, 2]
    expected = torch.stack(
        [x[row].double() @ a[i].double().T @ b[i].double().T for row, i in enumerate(indices)]
    )
    for given in (indices, torch.tensor(indices), torch.tensor(indices, device=device)):
        d = lp.multi_lora(x, a, b, given, impl=impl)
        torch.testing.assert_close(d.double(), expected, atol=1e-3, rtol=0)
    half = lp.multi_lora(x, a, b, indices, scaling=[0.5] * 3, ranks=[16] * 3, impl=impl)
    torch.testing.assert_close(half.double(), expected / 2, atol=1e-3, rtol=0)


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("op", OPS)
def test_choices(op: str, impl: str, device: torch.device) -> None:
    inputs = build(named("slices_3"), torch.float16, device)
    assert_passes(inputs.run(op, impl), op, inputs)


@pytest.mark.parametrize(
    ("op", "impl"),
    [(op, impl) for op in OPS for impl in TRITON_IMPLS[op] if impl not in GENERAL_IMPLS]
    or [pytest.param("", "", marks=pytest.mark.skip(reason="no special implementation"))],
)
def test_special_implementations_take_some_problems(
    op: str, impl: str, device: torch.device
) -> None:
    """Refusing everything would pass every other test."""
    taken = 0
    for case in CASES:
        if not case.concerns(op) or (case.is_large and device.type == "cpu"):
            continue
        try:
            build(case, torch.float16, device).run(op, impl)
        except UnsupportedImplError:
            continue
        taken += 1
        if taken == 3:
            return
    pytest.fail(f"{impl} took {taken} of all cases")
