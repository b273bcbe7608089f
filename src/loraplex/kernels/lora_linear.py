"""y = x W^T + scaling * v B^T: the expand is added onto the base GEMM's accumulator."""

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.tile import expand_tile, finish_rows, locate_slice


@triton.jit
def lora_linear_kernel(
    x_ptr, stride_xm, stride_xk,
    weight_ptr, stride_wn, stride_wk,
    bias_ptr,
    y_ptr, stride_ym, stride_yn,
    entries_ptr, stride_el,
    stride_br,
    partial_ptr, stride_pk, stride_pm, stride_ps,
    indices_ptr,
    places_ptr,
    plan_ptr,
    num_tokens,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_COLUMN_SCALE: tl.constexpr,
    HAS_ADAPTER_BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y [M, N] = column_scale * (x W^T + scaling * v B^T) + bias + adapter_bias.

    x [M, K]; weight [N, K]; partial [SPLIT_K, M, S, R_max] from the shrink.
    """
    # which tile: row blocks next to each other share the weight's columns in the cache
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    part, start, width, first = locate_slice(tl.program_id(1), SLICES, BLOCK_N)
    column = first + tl.arange(0, BLOCK_N)

    # base GEMM
    x_row = x_ptr + row.to(tl.int64)[:, None] * stride_xm
    weight_row = weight_ptr + (start + column).to(tl.int64)[None, :] * stride_wn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k_first in range(0, K, BLOCK_K):
        k = k_first + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_row + k.to(tl.int64)[None, :] * stride_xk,
            mask=(row < num_tokens)[:, None] & (k < K)[None, :],
            other=0.0,
        )
        weight = tl.load(
            weight_row + k.to(tl.int64)[:, None] * stride_wk,
            mask=(k < K)[:, None] & (column < width)[None, :],
            other=0.0,
        )
        acc = tl.dot(x, weight, acc, input_precision=PRECISION)

    # the adapters of this tile, onto the same accumulator
    acc = expand_tile(
        acc,
        entries_ptr, stride_el,
        stride_br,
        partial_ptr, stride_pk, stride_pm, stride_ps,
        places_ptr,
        plan_ptr,
        num_tokens, row, column, part, width,
        SPLIT_K, RANK_MULTIPLE, TILE_M, PLACES, BLOCK_R,
        y_ptr.dtype.element_ty, PRECISION,
    )  # fmt: skip

    acc = finish_rows(
        acc,
        entries_ptr, stride_el,
        indices_ptr,
        bias_ptr,
        num_tokens, row, column, part, start, width,
        HAS_BIAS, HAS_COLUMN_SCALE, HAS_ADAPTER_BIAS,
    )  # fmt: skip
    target = y_ptr + row.to(tl.int64)[:, None] * stride_ym
    target += (start + column).to(tl.int64)[None, :] * stride_yn
    mask = (row < num_tokens)[:, None] & (column < width)[None, :]
    tl.store(target, acc.to(y_ptr.dtype.element_ty), mask=mask)


def launch_lora_linear(
    x,
    weight,
    bias,
    y,
    entries,
    stride_br,
    partial,
    indices,
    places,
    plan,
    *,
    slices,
    rank_multiple,
    has_column_scale,
    has_adapter_bias,
    tile_m,
    num_places,
    precision,
    block_m,
    block_n,
    block_k,
    block_r,
    num_warps,
    num_stages,
):
    """Write ``y`` [M, N]; ``partial`` is what :func:`launch_shrink` filled."""
    num_tokens, in_features = x.shape
    column_blocks = sum(triton.cdiv(width, block_n) for width in slices)
    lora_linear_kernel[(triton.cdiv(num_tokens, block_m), column_blocks)](
        x, x.stride(0), x.stride(1),
        weight, weight.stride(0), weight.stride(1),
        bias if bias is not None else y,
        y, y.stride(0), y.stride(1),
        entries, entries.stride(0),
        stride_br,
        partial, partial.stride(0), partial.stride(1), partial.stride(2),
        indices,
        places,
        plan,
        num_tokens,
        K=in_features,
        SLICES=slices,
        SPLIT_K=partial.shape[0],
        RANK_MULTIPLE=rank_multiple,
        HAS_BIAS=bias is not None,
        HAS_COLUMN_SCALE=has_column_scale,
        HAS_ADAPTER_BIAS=has_adapter_bias,
        TILE_M=tile_m,
        PLACES=num_places,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_R=block_r,
        PRECISION=precision,
        num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip
