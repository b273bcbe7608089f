"""The oracles against merged weights: an adapter's layer is W + scaling * B A, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraplex.reference import lora
from loraplex.reference.matmul import fused_matmul_expand, matmul
from loraplex.reference.unpack import SliceLora

K, SLICES = 11, (7, 5)
INDICES = [1, -1, 0, 2, 1, -1]
F64 = torch.float64


def adapters(*, has_extras: bool) -> dict[int, list[SliceLora]]:
    """Slot 2 has no A and B in its second slice."""

    def part(slot: int, width: int, rank: int) -> SliceLora:
        return SliceLora(
            a=torch.randn(rank, K, dtype=F64),
            b=torch.randn(width, rank, dtype=F64),
            scaling=0.5 + slot,
            column_scale=torch.rand(width) + 0.5 if has_extras and slot != 1 else None,
            bias=torch.randn(width) if has_extras and slot != 0 else None,
        )

    return {
        slot: [part(slot, width, 0 if (slot, s) == (2, 1) else 3) for s, width in enumerate(SLICES)]
        for slot in range(3)
    }


def merged(x: Tensor, weight: Tensor, parts: list[SliceLora], bias: Tensor | None) -> Tensor:
    """One row through a layer whose weight holds the adapter."""
    outputs = []
    for part, own in zip(parts, weight.split(SLICES), strict=True):
        y = (own + part.scaling * part.b @ part.a) @ x
        outputs.append(y if part.column_scale is None else part.column_scale * y)
    y = torch.cat(outputs)
    if bias is not None:
        y = y + bias
    extra = [torch.zeros(len(p.b)) if p.bias is None else p.bias for p in parts]
    return y + torch.cat(extra)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("has_extras", [False, True], ids=["lora", "dora"])
def test_lora_linear_is_the_merged_layer(has_extras: bool, has_bias: bool) -> None:
    x, weight = torch.randn(len(INDICES), K, dtype=F64), torch.randn(sum(SLICES), K, dtype=F64)
    bias = torch.randn(sum(SLICES), dtype=F64) if has_bias else None
    slots = adapters(has_extras=has_extras)
    y = lora.lora_linear(x, weight, slots, torch.tensor(INDICES), bias)
    base = torch.nn.functional.linear(x, weight, bias)
    for row, slot in enumerate(INDICES):
        if slot < 0:
            assert torch.equal(y[row], base[row])
        else:
            torch.testing.assert_close(y[row], merged(x[row], weight, slots[slot], bias))


def test_add_lora_is_the_same_on_any_base() -> None:
    x, weight = torch.randn(len(INDICES), K, dtype=F64), torch.randn(sum(SLICES), K, dtype=F64)
    slots = adapters(has_extras=True)
    bias = torch.randn(sum(SLICES), dtype=F64)
    y = torch.nn.functional.linear(x, weight, bias)
    result = lora.add_lora_(y, x, slots, torch.tensor(INDICES), bias)
    assert result is y
    torch.testing.assert_close(y, lora.lora_linear(x, weight, slots, torch.tensor(INDICES), bias))


def test_multi_lora_is_the_difference() -> None:
    x, weight = torch.randn(len(INDICES), K, dtype=F64), torch.randn(sum(SLICES), K, dtype=F64)
    slots = adapters(has_extras=False)
    d = lora.multi_lora(x, slots, torch.tensor(INDICES), sum(SLICES))
    y = lora.lora_linear(x, weight, slots, torch.tensor(INDICES))
    torch.testing.assert_close(d, y - x @ weight.T)
    assert not d[[1, 5]].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """A delta that float16 steps would lose: v overflows, the result does not."""
    x = torch.full((1, 512), 16.0, dtype=dtype)
    part = SliceLora(
        torch.full((1, 512), 16.0, dtype=dtype), torch.full((1, 1), 2.0**-14, dtype=dtype), 1.0,
        None, None,
    )  # fmt: skip
    d = lora.multi_lora(x, {0: [part]}, torch.tensor([0]), 1)
    assert d.dtype == dtype
    assert d.item() == 8.0


def test_products() -> None:
    x, c = torch.randn(3, 5, dtype=F64), torch.randn(5, 4, dtype=F64)
    y, b = torch.randn(3, 2, dtype=F64), torch.randn(2, 4, dtype=F64)
    by_hand = torch.tensor(
        [[sum(x[i, k] * c[k, j] for k in range(5)) for j in range(4)] for i in range(3)], dtype=F64
    )
    torch.testing.assert_close(matmul(x, c), by_hand)
    torch.testing.assert_close(fused_matmul_expand(x, c, y, b), by_hand + y @ b)


def test_fused_product_is_rounded_once() -> None:
    """2048 + 1 is 2048 in float16, and 2048 + 1 + 1 is 2050."""
    x = torch.tensor([[2048.0, 1.0]], dtype=torch.float16)
    one = torch.ones(1, 1, dtype=torch.float16)
    result = fused_matmul_expand(x, torch.ones(2, 1, dtype=torch.float16), one, one)
    assert result.item() == 2050.0
