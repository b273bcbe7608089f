"""Kernels that must pass and must fail, to prove the compile harness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class CompileCase:
    name: str
    launch: Callable[[], object]


@triton.jit
def small_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + lane, tl.load(x_ptr + lane, mask=lane < size, other=0.0), mask=lane < size)


@triton.jit
def dot_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    """One warp that keeps a large accumulator and its operands: too much for 255 registers."""
    lane = tl.arange(0, BLOCK)
    place = lane[:, None] * BLOCK + lane[None, :]
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for step in range(size):
        x = tl.load(x_ptr + step * BLOCK * BLOCK + place)
        w = tl.load(x_ptr + (step + size) * BLOCK * BLOCK + place)
        acc = tl.dot(x, w, acc)
    tl.store(y_ptr + place, acc)


@triton.jit
def broken_kernel(x_ptr, size):
    tl.store(x_ptr + tl.arange(0, 3), 0.0)


def _small() -> None:
    x = torch.empty(1024, device="meta")
    small_kernel[(4,)](x, x, 1024, BLOCK=256)


def _dot(block: int, num_warps: int, num_stages: int, dtype: torch.dtype = torch.float16) -> None:
    x = torch.empty(1024, block, block, device="meta", dtype=dtype)
    y = torch.empty(block, block, device="meta")
    dot_kernel[(1,)](x, y, 1024, BLOCK=block, num_warps=num_warps, num_stages=num_stages)


def _broken() -> None:
    broken_kernel[(1,)](torch.empty(4, device="meta"), 1)


def compile_cases(arch: str) -> Iterator[CompileCase]:
    yield CompileCase("good", _small)
    yield CompileCase("good/dot", partial(_dot, 32, 4, 2))
    yield CompileCase("spills", partial(_dot, 128, 1, 1))
    yield CompileCase("shared", partial(_dot, 128, 8, 9, torch.float32))
    yield CompileCase("broken", _broken)
