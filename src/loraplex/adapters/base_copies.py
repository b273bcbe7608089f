"""Copies of frozen base weights in adapter files, compared with the base that is served."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from loraplex.adapters.adapter import Adapter
from loraplex.errors import AdapterError

BLOCK_ELEMENTS = 4 << 20  # heads are large; their float32 forms need not exist at once


def check_base_copies(adapter: Adapter, weight_of: Callable[[str], torch.Tensor | None]) -> Adapter:
    """Compare the base weights that PEFT stored with the adapter; returns it without them.

    PEFT stores the frozen ``embed_tokens`` and ``lm_head`` when LoRA is on them. Equal copies say
    nothing new; other values mean that the adapter was trained on another base.

    Args:
        adapter: from ``load_adapter``.
        weight_of: the base's parameter of that name, or None where it has none to compare
            (quantised, on another rank).

    Raises:
        AdapterError: a copy has another shape than the base's parameter.
    """
    for name, copy in adapter.base_copies.items():
        weight = weight_of(name)
        if weight is None:
            continue
        if weight.shape != copy.shape:
            raise AdapterError(
                f"{adapter.path}: {name} was stored with shape {tuple(copy.shape)}, the base has "
                f"{tuple(weight.shape)}: were added tokens part of the training?"
            )
        if weight.is_floating_point() and not _is_same(weight.detach(), copy):
            warnings.warn(
                f"{adapter.path}: the file's copy of {name} differs from the base model: the "
                "adapter was trained on other weights",
                UserWarning,
                stacklevel=2,
            )
    return adapter.without_base_copies()


def _is_same(weight: torch.Tensor, copy: torch.Tensor) -> bool:
    """Equal, or, where the dtypes differ, roundings of the same numbers."""
    if weight.dtype == copy.dtype:
        return torch.equal(weight.to(copy.device), copy)
    if copy.is_complex():
        return False
    # One rounding in either dtype; float16 loses small values to its subnormal numbers.
    rtol = max(torch.finfo(t.dtype).eps for t in (weight, copy) if t.is_floating_point())
    atol = 2.0**-24 if torch.float16 in (weight.dtype, copy.dtype) else 0.0
    rows = max(1, BLOCK_ELEMENTS // max(1, copy[:1].numel()))
    return all(
        torch.allclose(
            weight[start : start + rows].to(copy.device, torch.float32),
            copy[start : start + rows].to(torch.float32),
            rtol=rtol,
            atol=atol,
        )
        for start in range(0, len(copy), rows)
    )
