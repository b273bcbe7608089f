"""Ops compute no gradients; a backward pass through one is an error, never a wrong number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor


class _WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, run: Callable[[], Tensor], *inputs: Tensor | None) -> Tensor:
        ctx.name = name
        out = run()
        if any(out is tensor for tensor in inputs):
            ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        raise RuntimeError(
            f"loraplex.{ctx.name} computes no gradients; train with PEFT, and call it under "
            "torch.no_grad() or torch.inference_mode()"
        )


def without_backward(name: str, run: Callable[[], Tensor], *inputs: Tensor | None) -> Tensor:
    """``run()``; where autograd is recording, its result raises when a backward pass reaches it."""
    is_recorded = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in inputs
    )
    if not is_recorded:
        return run()
    result: Tensor = _WithoutBackward.apply(name, run, *inputs)  # type: ignore[no-untyped-call]
    return result
