"""Oracles of the routed ops; low precisions are computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from loraplex.reference.unpack import SliceLora


def add_lora_(
    y: Tensor,
    x: Tensor,
    adapters: Mapping[int, Sequence[SliceLora]],
    indices: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """y = column_scale * (y - bias + scaling * (x A^T) B^T) + bias + adapter_bias, in place.

    x [M, K], y [M, N], indices [M]; rows of index -1 are not touched. ``bias`` is what y holds.
    """
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    for slot, parts in adapters.items():
        rows = (indices == slot).nonzero()[:, 0]
        hidden = x[rows].to(wide)
        start = 0
        for part in parts:
            width = part.b.shape[0]
            own = y[rows, start : start + width].to(wide)
            delta = part.scaling * ((hidden @ part.a.to(wide).T) @ part.b.to(wide).T)
            if part.column_scale is None:
                own = own + delta
            else:
                base_bias = 0.0 if bias is None else bias[start : start + width].to(wide)
                own = part.column_scale.to(wide) * (own - base_bias + delta) + base_bias
            if part.bias is not None:
                own = own + part.bias.to(wide)
            y[rows, start : start + width] = own.to(y.dtype)
            start += width
    return y


def lora_linear(
    x: Tensor,
    weight: Tensor,
    adapters: Mapping[int, Sequence[SliceLora]],
    indices: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """column_scale * (x W^T + scaling * (x A^T) B^T) + bias + adapter_bias, [M, N]."""
    return add_lora_(F.linear(x, weight, bias), x, adapters, indices, bias)


def multi_lora(
    x: Tensor, adapters: Mapping[int, Sequence[SliceLora]], indices: Tensor, n: int
) -> Tensor:
    """scaling * (x A^T) B^T, [M, N]; rows of index -1 are zero."""
    return add_lora_(x.new_zeros(x.shape[0], n), x, adapters, indices)
