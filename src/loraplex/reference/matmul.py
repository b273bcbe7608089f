"""Oracles of the plain products."""

from __future__ import annotations

import torch
from torch import Tensor


def matmul(x: Tensor, c: Tensor) -> Tensor:
    """x [M, K] @ c [K, N]."""
    return x @ c


def fused_matmul_expand(x: Tensor, c: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """x [M, K] @ c [K, N] + y [M, R] @ b [R, N], summed before the one rounding."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.to(wide) @ c.to(wide) + y.to(wide) @ b.to(wide)).to(x.dtype)
