"""w = x c, and o = x c + y b with the second product on the first one's accumulator."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from loraplex.kernels.tile import add_product


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x_ptr, stride_xm, stride_xk,
    c_ptr, stride_ck, stride_cn,
    y_ptr, stride_ym, stride_yr,
    b_ptr, stride_br, stride_bn,
    o_ptr, stride_om, stride_on,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o [M, N] = x [M, K] c [K, N] + y [M, R] b [R, N]; R = 0 leaves the second product out."""
    # which tile: GROUP_M row blocks walk the columns together, so that both operands stay in L2
    pid = tl.program_id(0)
    row_blocks = tl.cdiv(M, BLOCK_M)
    column_blocks = tl.cdiv(N, BLOCK_N)
    group_size = GROUP_M * column_blocks
    first_row_block = pid // group_size * GROUP_M
    group_rows = tl.minimum(row_blocks - first_row_block, GROUP_M)
    row_block = first_row_block + pid % group_size % group_rows
    column_block = pid % group_size // group_rows
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = (row < M)[:, None]
    in_columns = (column < N)[None, :]

    # x c
    x_row = x_ptr + row.to(tl.int64)[:, None] * stride_xm
    c_column = c_ptr + column.to(tl.int64)[None, :] * stride_cn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        offset = k.to(tl.int64)
        x = tl.load(x_row + offset[None, :] * stride_xk, mask=in_rows & (k < K)[None, :], other=0.0)
        c = tl.load(
            c_column + offset[:, None] * stride_ck, mask=in_columns & (k < K)[:, None], other=0.0
        )
        acc = add_product(acc, x, c, o_ptr.to(tl.int64) != 0, PRECISION)

    # y b, on the same accumulator: the sum never leaves the registers
    y_row = y_ptr + row.to(tl.int64)[:, None] * stride_ym
    b_column = b_ptr + column.to(tl.int64)[None, :] * stride_bn
    for first in range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        offset = r.to(tl.int64)
        y = tl.load(y_row + offset[None, :] * stride_yr, mask=in_rows & (r < R)[None, :], other=0.0)
        b = tl.load(
            b_column + offset[:, None] * stride_br, mask=in_columns & (r < R)[:, None], other=0.0
        )
        acc = add_product(acc, y, b, o_ptr.to(tl.int64) != 0, PRECISION)

    target = (
        o_ptr + row.to(tl.int64)[:, None] * stride_om + column.to(tl.int64)[None, :] * stride_on
    )
    tl.store(target, acc.to(o_ptr.dtype.element_ty), mask=in_rows & in_columns)


def launch_matmul(
    x: Tensor,
    c: Tensor,
    y: Tensor | None,
    b: Tensor | None,
    o: Tensor,
    *,
    precision: str,
    block_m: int,
    block_n: int,
    block_k: int,
    block_r: int,
    group_m: int,
    num_warps: int,
    num_stages: int,
) -> None:
    """Write ``o`` = x c (+ y b unless both are None)."""
    m, k = x.shape
    n = c.shape[1]
    second, third = (x, c) if y is None or b is None else (y, b)
    matmul_kernel[(-(-m // block_m) * -(-n // block_n),)](
        x, x.stride(0), x.stride(1),
        c, c.stride(0), c.stride(1),
        second, second.stride(0), second.stride(1),
        third, third.stride(0), third.stride(1),
        o, o.stride(0), o.stride(1),
        m,
        N=n,
        K=k,
        R=0 if y is None else y.shape[1],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_R=block_r,
        GROUP_M=group_m,
        PRECISION=precision,
        num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip
