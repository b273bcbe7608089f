"""The base GEMM's walk along K, and asking for the weight ahead of it."""

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.tile import add_product


@triton.jit
def base_steps(
    acc,
    x_ptr, stride_xm, stride_xk,
    weight_ptr, stride_wn, stride_wk,
    row, first_row,
    column, first_column,
    first_step,
    last_step,
    is_real,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc += x[row] weight[column]^T over the blocks first_step to last_step of K.

    With tensor descriptors in place of ``x_ptr`` and ``weight_ptr`` the copy engine fetches the
    tiles, and zeros past the end.
    """
    k = tl.arange(0, BLOCK_K)
    if not HAS_DESCRIPTOR:
        start = (first_step * BLOCK_K + k).to(tl.int64)[None, :]
        x_tile = x_ptr + row[:, None] * stride_xm + start * stride_xk
        weight_tile = weight_ptr + column[:, None] * stride_wn + start * stride_wk
    for step in range(first_step, last_step):
        if HAS_DESCRIPTOR:
            x = x_ptr.load([first_row, step * BLOCK_K])
            weight = weight_ptr.load([first_column, step * BLOCK_K])
        else:
            # parts of equal length may reach past the end of K
            if K % (BLOCK_K * PARTS) == 0:
                x = tl.load(x_tile)
                weight = tl.load(weight_tile)
            else:
                in_k = (step * BLOCK_K + k < K)[None, :]
                x = tl.load(x_tile, mask=in_k, other=0.0)
                weight = tl.load(weight_tile, mask=in_k, other=0.0)
            x_tile += BLOCK_K * stride_xk
            weight_tile += BLOCK_K * stride_wk
        if IS_SWAPPED:
            acc = add_product(acc, weight, x.T, is_real, PRECISION)
        else:
            acc = add_product(acc, x, weight.T, is_real, PRECISION)
    return acc


@triton.jit
def prefetch_weight(
    weight_ptr, stride_wn,
    column,
    first_k,
    PREFETCH: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Ask the L2 for ``PREFETCH`` elements of each weight row, from ``first_k`` on."""
    LINE: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    line = first_k + tl.arange(0, PREFETCH // LINE) * LINE
    address = weight_ptr + column.to(tl.int64)[:, None] * stride_wn + line[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
