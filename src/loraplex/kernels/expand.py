"""y += scaling * v B^T in one pass over an output that exists already."""

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.tile import expand_tile, finish_rows, locate_slice


@triton.jit
def expand_kernel(
    y_ptr, stride_ym, stride_yn,
    bias_ptr,
    entries_ptr, stride_el,
    stride_br,
    partial_ptr, stride_pk, stride_pm, stride_ps,
    indices_ptr,
    places_ptr,
    plan_ptr,
    num_tokens,
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
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y = column_scale * (y - bias + scaling * v B^T) + bias + adapter_bias, base rows untouched.

    y [M, N]; partial [SPLIT_K, M, S, R_max] from the shrink; bias is what y holds already.
    """
    # which tile; a tile without adapters is left alone
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    part, start, width, first = locate_slice(tl.program_id(1), SLICES, BLOCK_N)
    column = first + tl.arange(0, BLOCK_N)
    tile = tl.program_id(0) * BLOCK_M // TILE_M
    if tl.load(plan_ptr + tile * (16 + 3 * TILE_M)) == 0:
        return

    delta = expand_tile(
        tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32),
        entries_ptr, stride_el,
        stride_br,
        partial_ptr, stride_pk, stride_pm, stride_ps,
        places_ptr,
        plan_ptr,
        num_tokens, row, column, part, width,
        SPLIT_K, RANK_MULTIPLE, TILE_M, PLACES, BLOCK_R,
        y_ptr.dtype.element_ty, PRECISION,
    )  # fmt: skip

    # only rows with an adapter are read and written, so base rows keep their bits
    has_adapter = tl.load(places_ptr + row, mask=row < num_tokens, other=-1) >= 0
    target = y_ptr + row.to(tl.int64)[:, None] * stride_ym
    target += (start + column).to(tl.int64)[None, :] * stride_yn
    mask = has_adapter[:, None] & (column < width)[None, :]
    base = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + start + column, mask=column < width, other=0.0)
        base -= bias.to(tl.float32)[None, :]
    acc = finish_rows(
        base + delta,
        entries_ptr, stride_el,
        indices_ptr,
        bias_ptr,
        num_tokens, row, column, part, start, width,
        HAS_BIAS, HAS_COLUMN_SCALE, HAS_ADAPTER_BIAS,
    )  # fmt: skip
    tl.store(target, acc.to(y_ptr.dtype.element_ty), mask=mask)


def launch_expand(
    y,
    bias,
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
    block_r,
    num_warps,
    num_stages,
):
    """Add the adapters' part to ``y`` [M, N] in place; ``bias`` or None is what y holds already."""
    num_tokens = y.shape[0]
    column_blocks = sum(triton.cdiv(width, block_n) for width in slices)
    expand_kernel[(triton.cdiv(num_tokens, block_m), column_blocks)](
        y, y.stride(0), y.stride(1),
        bias if bias is not None else y,
        entries, entries.stride(0),
        stride_br,
        partial, partial.stride(0), partial.stride(1), partial.stride(2),
        indices,
        places,
        plan,
        num_tokens,
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
        BLOCK_R=block_r,
        PRECISION=precision,
        num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip
