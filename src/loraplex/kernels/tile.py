"""What the adapters of one tile of rows look like as columns of one wide product.

The distinct adapters of a tile stand side by side, each rounded up to whole chunks of 16 ranks, so
that several small ranks share one dot and the work follows the ranks that occur. A column of that
row of chunks belongs to one adapter and one of its ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(16)
ENTRY_FIELDS = tl.constexpr(8)


@triton.jit
def load_places(
    entries_ptr, stride_el,
    plan_ptr,
    tile,
    part,
    TILE_M: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Slots [PLACES] of a tile's adapters, and where each one's chunks end."""
    place = tl.arange(0, PLACES)
    plan = plan_ptr + tile * (16 + 3 * TILE_M)
    count = tl.load(plan)
    slot = tl.load(plan + 16 + place, mask=place < count, other=0)
    entry_ptr = entries_ptr + slot.to(tl.int64) * stride_el + part * ENTRY_FIELDS
    rank = tl.load(entry_ptr + 4, mask=place < count, other=0).to(tl.int32)
    ends = tl.cumsum((rank + CHUNK - 1) // CHUNK, axis=0)
    return slot, ends


@triton.jit
def locate_columns(slot, ends, column, PLACES: tl.constexpr):
    """Place, slot and rank index of each column; columns past the last chunk get place PLACES."""
    place = tl.arange(0, PLACES)
    chunk = column // CHUNK
    column_place = tl.sum((ends[None, :] <= chunk[:, None]).to(tl.int32), axis=1)
    is_mine = place[None, :] == column_place[:, None]
    column_slot = tl.sum(tl.where(is_mine, slot[None, :], 0), axis=1)
    is_before = place[None, :] + 1 == column_place[:, None]
    start = tl.sum(tl.where(is_before, ends[None, :], 0), axis=1)
    rank_index = (chunk - start) * CHUNK + column % CHUNK
    return column_place, column_slot, rank_index


@triton.jit
def locate_slice(pid, SLICES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slice, its first column, its width and where in it one block of outputs begins."""
    part = 0
    start = 0
    width = SLICES[0]
    block = pid
    first_block = 0
    first_column = 0
    for i in tl.static_range(len(SLICES)):
        blocks = tl.cdiv(SLICES[i], BLOCK_N)
        is_here = (pid >= first_block) & (pid < first_block + blocks)
        part = tl.where(is_here, i, part)
        start = tl.where(is_here, first_column, start)
        width = tl.where(is_here, SLICES[i], width)
        block = tl.where(is_here, pid - first_block, block)
        first_block += blocks
        first_column += SLICES[i]
    return part, start, width, block * BLOCK_N


@triton.jit
def expand_tile(
    acc,
    entries_ptr, stride_el,
    stride_br,
    partial_ptr, stride_pk, stride_pm, stride_ps,
    places_ptr,
    plan_ptr,
    num_tokens,
    row,
    column,
    part,
    width,
    SPLIT_K: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    TILE_M: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] += scaling * v B^T over the adapters of the tile, each row its own.

    row [BLOCK_M] global rows, column [BLOCK_N] columns of the slice ``part`` of that width;
    partial [SPLIT_K, M, S, R_max] float32 holds x A^T in planes that are summed in order.
    """
    tile = tl.min(row, axis=0) // TILE_M
    slot, ends = load_places(entries_ptr, stride_el, plan_ptr, tile, part, TILE_M, PLACES)
    row_place = tl.load(places_ptr + row, mask=row < num_tokens, other=-1)
    v_row = row.to(tl.int64) * stride_pm + part * stride_ps
    lane = tl.arange(0, BLOCK_R)
    total = tl.max(ends, axis=0) * CHUNK
    for first in range(0, total, BLOCK_R):
        # which adapter and rank each of the BLOCK_R columns is
        place, its_slot, rank_index = locate_columns(slot, ends, first + lane, PLACES)
        entry_ptr = entries_ptr + its_slot.to(tl.int64) * stride_el + part * ENTRY_FIELDS
        is_adapter = place < PLACES
        rank = tl.load(entry_ptr + 4, mask=is_adapter, other=0).to(tl.int32)
        scale = tl.load(entry_ptr + 5, mask=is_adapter, other=0).to(tl.int32)
        scale = scale.to(tl.float32, bitcast=True)
        b_ptr = tl.load(entry_ptr + 2, mask=is_adapter, other=0)
        stride_bn = tl.load(entry_ptr + 3, mask=is_adapter, other=0)
        is_rank = rank_index < rank

        # each row keeps the columns of its own adapter
        is_own = (row_place[:, None] == place[None, :]) & is_rank[None, :]
        v = tl.zeros((row.shape[0], BLOCK_R), dtype=tl.float32)
        v_ptr = partial_ptr + v_row[:, None] + rank_index[None, :]
        for _ in range(SPLIT_K):
            v += tl.load(v_ptr, mask=is_own, other=0.0)
            v_ptr += stride_pk
        v = (v * scale[None, :]).to(DTYPE)

        address = b_ptr.to(tl.pointer_type(DTYPE))[:, None] + (
            column.to(tl.int64)[None, :] * stride_bn[:, None]
            + (rank_index.to(tl.int64) * stride_br)[:, None]
        )
        if RANK_MULTIPLE == 8:
            address = tl.multiple_of(tl.max_contiguous(address, [8, 1]), [16, 1])
            is_rank = tl.max_constancy(is_rank, [8])
        b = tl.load(address, mask=is_rank[:, None] & (column < width)[None, :], other=0.0)
        acc = tl.dot(v, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def finish_rows(
    acc,
    entries_ptr, stride_el,
    indices_ptr,
    bias_ptr,
    num_tokens,
    row,
    column,
    part,
    start,
    width,
    HAS_BIAS: tl.constexpr,
    HAS_COLUMN_SCALE: tl.constexpr,
    HAS_ADAPTER_BIAS: tl.constexpr,
):  # fmt: skip
    """acc * column_scale + bias + adapter_bias, the last columns of each row's own adapter."""
    if HAS_COLUMN_SCALE or HAS_ADAPTER_BIAS:
        index = tl.load(indices_ptr + row, mask=row < num_tokens, other=-1)
        entry_ptr = entries_ptr + index.to(tl.int64) * stride_el + part * ENTRY_FIELDS
    if HAS_COLUMN_SCALE:
        scale_ptr = tl.load(entry_ptr + 6, mask=index >= 0, other=0)
        has_scale = (scale_ptr != 0)[:, None] & (column < width)[None, :]
        scale_ptr = scale_ptr.to(tl.pointer_type(tl.float32))
        acc *= tl.load(scale_ptr[:, None] + column[None, :], mask=has_scale, other=1.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + start + column, mask=column < width, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if HAS_ADAPTER_BIAS:
        own_ptr = tl.load(entry_ptr + 7, mask=index >= 0, other=0)
        has_own = (own_ptr != 0)[:, None] & (column < width)[None, :]
        own_ptr = own_ptr.to(tl.pointer_type(tl.float32))
        acc += tl.load(own_ptr[:, None] + column[None, :], mask=has_own, other=0.0)
    return acc
