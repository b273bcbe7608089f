"""The delta in one launch: a program per token and block of outputs, nothing in between."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from loraplex.kernels.tile import ENTRY_FIELDS, locate_slice


@triton.jit
def one_launch_kernel(
    x_ptr, stride_xm, stride_xk,
    entries_ptr, stride_el,
    stride_ak,
    stride_br,
    indices_ptr,
    d_ptr, stride_dm, stride_dn,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """d[m] = scaling * (x[m] A[index(m)]^T) B[index(m)]^T, zero where index(m) = -1.

    x [M, K]; d [M, N]; BLOCK_R covers every rank, so x A^T stays in registers.
    """
    # which token, which outputs
    token = tl.program_id(0).to(tl.int64)
    part, start, width, first = locate_slice(tl.program_id(1), SLICES, BLOCK_N)
    column = first + tl.arange(0, BLOCK_N)
    target = d_ptr + token * stride_dm + (start + column).to(tl.int64) * stride_dn

    # which adapter; a base row's delta is zero
    index = tl.load(indices_ptr + token)
    if index < 0:
        tl.store(target, tl.zeros((BLOCK_N,), d_ptr.dtype.element_ty), mask=column < width)
        return
    entry_ptr = entries_ptr + index.to(tl.int64) * stride_el + part * ENTRY_FIELDS
    dtype = x_ptr.dtype.element_ty
    a_ptr = tl.load(entry_ptr).to(tl.pointer_type(dtype))
    stride_ar = tl.load(entry_ptr + 1)
    b_ptr = tl.load(entry_ptr + 2).to(tl.pointer_type(dtype))
    stride_bn = tl.load(entry_ptr + 3)
    rank = tl.load(entry_ptr + 4).to(tl.int32)
    scale = tl.load(entry_ptr + 5).to(tl.int32).to(tl.float32, bitcast=True)

    # v = x A^T
    r = tl.arange(0, BLOCK_R)
    v = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for k_first in range(0, K, BLOCK_K):
        k = (k_first + tl.arange(0, BLOCK_K)).to(tl.int64)
        x = tl.load(x_ptr + token * stride_xm + k * stride_xk, mask=k < K, other=0.0)
        a = tl.load(
            a_ptr + r.to(tl.int64)[:, None] * stride_ar + k[None, :] * stride_ak,
            mask=(r < rank)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        v += tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)

    # v B^T
    b = tl.load(
        b_ptr + column.to(tl.int64)[:, None] * stride_bn + r.to(tl.int64)[None, :] * stride_br,
        mask=(column < width)[:, None] & (r < rank)[None, :],
        other=0.0,
    )
    d = scale * tl.sum(b.to(tl.float32) * v[None, :], axis=1)
    tl.store(target, d.to(d_ptr.dtype.element_ty), mask=column < width)


def launch_one_launch(
    x: Tensor,
    entries: Tensor,
    stride_ak: int,
    stride_br: int,
    indices: Tensor,
    d: Tensor,
    *,
    slices: tuple[int, ...],
    block_n: int,
    block_k: int,
    block_r: int,
    num_warps: int,
) -> None:
    """Write the delta ``d`` [M, N]."""
    num_tokens, in_features = x.shape
    column_blocks = sum(-(-width // block_n) for width in slices)
    one_launch_kernel[(num_tokens, column_blocks)](
        x, x.stride(0), x.stride(1),
        entries, entries.stride(0),
        stride_ak,
        stride_br,
        indices,
        d, d.stride(0), d.stride(1),
        K=in_features,
        SLICES=slices,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_R=block_r,
        num_warps=num_warps,
    )  # fmt: skip
