"""Tensors with other strides, and memory that is NaN until somebody writes it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("dense", "wide", "odd", "stepped", "transposed")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, uninitialised memory of new tensors is NaN (integers: the largest value).

    torch itself does it, below Python, so that scratch of ops and outputs of kernels are covered
    however they are allocated; captured CUDA graphs repeat it at every replay.
    """
    flags: Any = torch.utils.deterministic
    was_filling = flags.fill_uninitialized_memory
    mode = torch.get_deterministic_debug_mode()
    flags.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            # warn_only speaks of every cuBLAS call; which algorithm runs does not matter here
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        flags.fill_uninitialized_memory = was_filling


def lay_out(dense: Tensor, layout: str) -> Tensor:
    """The same values with other strides; the memory around and between them is NaN.

    ``wide`` keeps rows 16-byte aligned where they were, ``odd`` starts one element later and has an
    odd row stride, ``stepped`` leaves a gap after each element, ``transposed`` swaps the axes.
    """
    *outer, rows, columns = dense.shape
    shapes = {
        "dense": (rows, columns),
        "wide": (rows + 1, columns + 8),
        "odd": (rows + 1, columns + 2 - columns % 2 + 1),
        "stepped": (rows + 1, 2 * columns + 2),
        "transposed": (columns + 1, rows + 3),
    }
    buffer = torch.full(
        (*outer, *shapes[layout]), float("nan"), dtype=dense.dtype, device=dense.device
    )
    view = buffer.mT if layout == "transposed" else buffer
    first = 1 if layout == "odd" else 0
    step = 2 if layout == "stepped" else 1
    view = view[..., :rows, first : first + step * columns : step]
    return view.copy_(dense)


def is_surrounding_untouched(view: Tensor) -> bool:
    """Whether the memory around a finite tensor made by :func:`lay_out` is NaN still."""
    buffer = view if view._base is None else view._base
    return int(buffer.isnan().sum()) == buffer.numel() - view.numel()
