"""What ``auto`` would run for a problem, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loraplex.checks import (
    REFERENCE_DTYPES,
    check_int,
    check_slices,
    check_usable_device,
    dtype_name,
)
from loraplex.ops.impls import TRITON_IMPLS, arch_of, check_impl, resolve
from loraplex.tuning import Choice, Problem


@dataclass(frozen=True)
class Explanation:
    """The problem, the choice made for it, and a readable summary as ``str()``."""

    problem: Problem
    choice: Choice

    def __str__(self) -> str:
        p = self.problem
        lines = [
            f"{p.op}: {self.choice.impl} ({self.choice.reason})",
            f"  M={p.m} K={p.k} slices={list(p.slices)} L={p.num_adapters} R_max={p.max_rank} "
            f"{p.dtype} on {p.arch}",
        ]
        for kernel, config in self.choice.configs.items():
            lines.append(f"  {kernel}: " + " ".join(f"{k}={v}" for k, v in config.items()))
        return "\n".join(lines)


def explain(
    op: str,
    *,
    m: int,
    k: int,
    slices: Sequence[int],
    num_adapters: int = 0,
    max_rank: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    impl: str = "auto",
) -> Explanation:
    """The implementation and block sizes of one op on one problem, with the reason.

    Args:
        op: ``"lora_linear"``, ``"add_lora"``, ``"multi_lora"`` or ``"matmul"``.
        m, k: tokens and in-features; slices: widths of the outputs.
        num_adapters, max_rank: capacity of the table.

    Raises:
        ValueError, TypeError: unknown op or ``impl``, or a size that is no whole number.
        UnsupportedImplError: ``impl`` was named and cannot run on this device.

    Example:
        >>> import loraplex as lp
        >>> lp.explain("matmul", m=64, k=4096, slices=[4096], device="cpu").choice.impl
        'torch'
    """
    if op not in tuple(TRITON_IMPLS):
        raise ValueError(f"op must be one of {', '.join(TRITON_IMPLS)}, got {op!r}")
    if dtype not in REFERENCE_DTYPES:
        raise TypeError(f"dtype must be a floating dtype of 32, 16 or 64 bits, got {dtype!r}")
    widths = check_slices(slices, None)
    check_impl(op, impl)
    where = check_usable_device("device", device)
    problem = Problem(
        op,
        check_int("m", m, 0),
        check_int("k", k, 1),
        widths,
        check_int("num_adapters", num_adapters, 0),
        check_int("max_rank", max_rank, 0),
        dtype_name(dtype),
        arch_of(where),
    )
    return Explanation(problem, resolve(problem, impl, where))
