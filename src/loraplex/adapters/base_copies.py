"""Copies of frozen base weights in adapter files, compared with the base that is served."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from loraplex.adapters.adapter import Adapter
from loraplex.errors import AdapterError


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
        # Compared in the dtype of the file: the base may have been loaded in another one.
        if not torch.equal(weight.detach().to(copy.device, copy.dtype), copy):
            warnings.warn(
                f"{adapter.path}: the file's copy of {name} differs from the base model: the "
                "adapter was trained on other weights",
                UserWarning,
                stacklevel=2,
            )
    return adapter.without_base_copies()
