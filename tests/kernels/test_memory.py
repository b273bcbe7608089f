"""Kernels write what is theirs and nothing beside it; what they read of others' never counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import loraplex as lp
from loraplex.errors import UnsupportedImplError
from loraplex.ops.impls import TRITON_IMPLS
from loraplex.testing import GENERAL_IMPLS, Case, build, is_surrounding_untouched, lay_out

FENCE = 512  # elements; keeps every alignment
CASES = (
    Case("K08_odd", m=5, k=37, slices=(29, 3), ranks=(5, 8), indices="mixed"),
    Case("K08_aligned", m=17, k=48, slices=(40, 24), ranks=(8, 24), indices="mixed"),
    Case("K08_one", m=1, k=33, slices=(1,), ranks=(1,), indices=(0,)),
)


class Fences:
    """Surrounds what ``torch.empty`` gives with a pattern that nobody may write."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self._empty = torch.empty

    def empty(self, *size: Any, **options: Any) -> Tensor:
        if not size:
            return self._empty(**options)
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        buffer = self._empty(shape.numel() + 2 * FENCE, **options)
        self.pattern(buffer)[...] = 0x5A
        self.buffers.append(buffer)
        inner = buffer[FENCE : FENCE + shape.numel()]
        # as uninitialised memory is elsewhere in these tests
        inner.fill_(float("nan") if inner.is_floating_point() else torch.iinfo(inner.dtype).max)
        return inner.view(shape)

    def pattern(self, buffer: Tensor) -> Tensor:
        return buffer.view(torch.uint8)

    def are_whole(self) -> bool:
        parts = [part for b in self.buffers for part in (b[:FENCE], b[b.numel() - FENCE :])]
        return all(bool((self.pattern(part) == 0x5A).all()) for part in parts)


@pytest.fixture
def fences(monkeypatch: pytest.MonkeyPatch) -> Fences:
    built = Fences()
    monkeypatch.setattr(torch, "empty", built.empty)
    return built


def test_fences_notice(fences: Fences, device: torch.device) -> None:
    inside = torch.empty((2, 3), dtype=torch.float16, device=device)
    inside.zero_()
    assert fences.are_whole()
    inside.as_strided((1,), (1,), inside.storage_offset() + 6).zero_()
    assert not fences.are_whole()


@pytest.mark.parametrize(
    ("op", "impl", "case"),
    [
        pytest.param(op, impl, case, id=f"{op}-{impl}-{case}")
        for op, impls in TRITON_IMPLS.items()
        if op != "matmul"
        for impl in impls
        for case in CASES
    ],
)
def test_K08_nothing_beside_outputs_and_scratch(
    op: str, impl: str, case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = build(case, torch.float16, device)
    fences = Fences()
    monkeypatch.setattr(torch, "empty", fences.empty)
    try:
        result = inputs.run(op, impl)
    except UnsupportedImplError as refusal:
        if impl in GENERAL_IMPLS:
            raise
        pytest.skip(str(refusal))
    assert fences.buffers
    assert result.isfinite().all()
    assert fences.are_whole()


@pytest.mark.parametrize("impl", TRITON_IMPLS["matmul"])
def test_K08_nothing_beside_a_product(impl: str, fences: Fences, device: torch.device) -> None:
    x, c = torch.randn(5, 37, device=device), torch.randn(37, 29, device=device)
    result = lp.fused_matmul_expand(x, c, x[:, :3], c[:3], impl=impl)
    assert fences.buffers
    assert result.isfinite().all()
    assert fences.are_whole()


@pytest.mark.parametrize("layout", ["wide", "odd", "stepped", "transposed"])
@pytest.mark.parametrize("impl", TRITON_IMPLS["add_lora"])
def test_K08_nothing_beside_y(impl: str, layout: str, device: torch.device) -> None:
    case = Case("beside_y", m=5, k=37, slices=(29, 3), ranks=(5, 8), indices="mixed")
    inputs = build(case, torch.float16, device)
    y = lay_out(inputs.y, layout)
    assert is_surrounding_untouched(y)
    lp.add_lora_(y, inputs.x, inputs.table, inputs.routing, impl=impl)
    assert y.isfinite().all()
    assert is_surrounding_untouched(y)


@pytest.mark.parametrize("impl", ["torch", *TRITON_IMPLS["lora_linear"]])
def test_inputs_stay_as_they_were(impl: str, device: torch.device) -> None:
    case = Case("inputs", m=9, k=48, slices=(40,), ranks=(8, 16), indices="mixed")
    inputs = build(case, torch.float16, device)
    tensors = [
        inputs.x, inputs.weight, inputs.table.entries, *inputs.table.storages,
        inputs.routing.indices, inputs.routing.places, inputs.routing.plan,
    ]  # fmt: skip
    before = [tensor.clone() for tensor in tensors]
    try:
        inputs.run("lora_linear", impl)
    except UnsupportedImplError as refusal:
        pytest.skip(str(refusal))
    for tensor, copy in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def test_uninitialised_memory_is_nan(device: torch.device) -> None:
    """What the other tests stand on."""
    assert torch.empty(3, device=device).isnan().all()
    assert torch.empty((2, 2), dtype=torch.bfloat16, device=device).isnan().all()
    assert torch.ones(2, device=device).new_empty(5).isnan().all()
    assert (torch.empty(3, dtype=torch.int32, device=device) == 2**31 - 1).all()
