"""What an op should give: in float64, and as plain torch in the same dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from loraplex.reference import lora as reference
from loraplex.reference.unpack import SliceLora
from loraplex.testing.build import Inputs


def truth(op: str, inputs: Inputs) -> Tensor:
    """The answer in float64."""
    return _answer(op, inputs, torch.float64, reference.add_lora_)


def eager(op: str, inputs: Inputs) -> Tensor:
    """The answer of plain torch in the dtype of the inputs, rounded after every step."""
    return _answer(op, inputs, inputs.x.dtype, _eager_add_)


def order_slack(inputs: Inputs, wanted: Tensor) -> float:
    """What the order of a few float32 sums may cost where torch's happens to be a lucky one.

    For few rows torch's library may add up in a tree, whose error is below half of that of a walk
    along K; and among few results the largest error of either is a matter of luck.
    """
    if not wanted.numel():
        return 0.0
    one_rounding = torch.finfo(torch.float32).eps / 2
    terms = inputs.case.k + inputs.case.capacity
    return one_rounding * math.sqrt(terms) * float(wanted.abs().max())


def _answer(op: str, inputs: Inputs, dtype: torch.dtype, add_: Callable[..., Tensor]) -> Tensor:
    x = inputs.x.to(dtype)
    bias = None if inputs.bias is None else inputs.bias.to(dtype)
    adapters = {
        slot: [
            SliceLora(p.a.to(dtype), p.b.to(dtype), p.scaling, p.column_scale, p.bias)
            for p in parts
        ]
        for slot, parts in inputs.adapters.items()
    }
    indices = inputs.indices.to(x.device)
    if op == "lora_linear":
        y = F.linear(x, inputs.weight.to(dtype), bias)
    else:
        y = (
            inputs.y.to(dtype, copy=True)
            if op == "add_lora"
            else torch.zeros_like(inputs.y).to(dtype)
        )
    return add_(y, x, adapters, indices, bias)


def _eager_add_(
    y: Tensor,
    x: Tensor,
    adapters: dict[int, list[SliceLora]],
    indices: Tensor,
    bias: Tensor | None,
) -> Tensor:
    for slot, parts in adapters.items():
        rows = (indices == slot).nonzero()[:, 0]
        starts = accumulate((part.b.shape[0] for part in parts), initial=0)
        for part, start in zip(parts, starts, strict=False):
            columns = slice(start, start + part.b.shape[0])
            own = y[rows, columns] + part.scaling * (x[rows] @ part.a.T @ part.b.T)
            if part.column_scale is not None:
                shift = torch.zeros((), dtype=y.dtype) if bias is None else bias[columns]
                own = (own - shift) * part.column_scale.to(y.dtype) + shift
            if part.bias is not None:
                own = own + part.bias.to(y.dtype)
            y[rows, columns] = own
    return y
