"""What the adapters of one tile of rows look like as columns of one wide product.

The distinct adapters of a tile stand side by side, each in whole groups of 8 ranks, so that several
small ranks share one dot and the work follows the ranks that occur. For each group the shrink notes
where its 8 columns of B are, whose they are and which ranks; a row's v counts only where the group
is its own adapter's:

| int64 | content of a group |
| --- | --- |
| 0 | address of B's first column of the group |
| 1 | row stride of B, in elements |
| 2 | place of the adapter in the tile, -2 in groups that fill up the last block |
| 3 | first rank of the group, shifted by 8 bits, plus how many of its columns are ranks |
"""

from __future__ import annotations

import triton
import triton.language as tl

ENTRY_FIELDS = tl.constexpr(8)
GROUP_FIELDS = tl.constexpr(4)


@triton.jit
def add_product(acc, left, right, is_real, PRECISION: tl.constexpr):
    """acc + left right; in float32 block by block, since one long chain of sums loses digits.

    ``is_real`` is true, but only known when the kernel runs: it keeps the compiler from making the
    two steps one chain again. (No comparison of a size will do, sizes of 1 are compiled in; nor
    an input's address, which is zero where it has no elements.)
    """
    if left.dtype == tl.float32:
        acc += tl.where(is_real, tl.dot(left, right, input_precision=PRECISION), 0.0)
    else:
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit
def load_groups_of_places(
    entries_ptr, stride_el,
    plan_ptr,
    tile,
    part,
    TILE_M: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """How many groups [PLACES] each adapter of a tile has in one slice."""
    place = tl.arange(0, PLACES)
    plan = plan_ptr + tile * (16 + 4 * TILE_M)
    is_place = place < tl.load(plan)
    slot = tl.load(plan + 16 + place, mask=is_place, other=0)
    entry_ptr = entries_ptr + slot.to(tl.int64) * stride_el + part * ENTRY_FIELDS
    rank = tl.load(entry_ptr + 4, mask=is_place, other=0).to(tl.int32)
    return (rank + 7) // 8


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
    v_ptr, stride_vk, stride_vm, stride_vs,
    groups_ptr, stride_gt, stride_gs,
    stride_br,
    row,
    row_place,
    column,
    tile,
    part,
    num_groups,
    V_SPLIT_K: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc += v B^T over the adapters of a tile, each row with its own.

    acc [BLOCK_M, BLOCK_N], or its transpose if swapped; v [V_SPLIT_K, M, S, R] holds the
    scaling; row and column are int64 and in range, column counts within the slice ``part``.
    """
    GROUPS: tl.constexpr = BLOCK_R // 8
    ITEM_SIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    lane = tl.arange(0, 8)[None, None, :]
    group_ptr = groups_ptr + tile.to(tl.int64) * stride_gt + part * stride_gs
    group_ptr += tl.arange(0, GROUPS) * GROUP_FIELDS
    v_row = part * stride_vs + row[:, None, None] * stride_vm
    for _ in tl.range(0, tl.cdiv(num_groups, GROUPS), num_stages=STAGES):
        address = tl.load(group_ptr)
        stride_bn = tl.load(group_ptr + 1)
        place = tl.load(group_ptr + 2)
        ranks = tl.load(group_ptr + 3)
        group_ptr += GROUPS * GROUP_FIELDS

        # columns [BLOCK_M, GROUPS, 8] of v, zero where a group is not the row's own adapter
        v_offset = v_row + (ranks >> 8)[None, :, None] + lane
        v_address = v_ptr + tl.reshape(v_offset, (BLOCK_M, BLOCK_R))
        is_own = row_place[:, None, None] == place[None, :, None]
        is_own = tl.broadcast_to(is_own, (BLOCK_M, GROUPS, 8))
        # rows [BLOCK_N, GROUPS, 8] of B
        b_address = address[None, :, None] + ITEM_SIZE * (
            column[:, None, None] * stride_bn[None, :, None] + lane.to(tl.int64) * stride_br
        )
        if RANK_MULTIPLE == 8:
            v_address = tl.multiple_of(tl.max_contiguous(v_address, [1, 8]), [1, 16])
            has_v = tl.max_constancy(tl.reshape(is_own, (BLOCK_M, BLOCK_R)), [1, 8])
            b_address = tl.reshape(b_address, (BLOCK_N, BLOCK_R)).to(tl.pointer_type(DTYPE))
            b = tl.load(tl.multiple_of(tl.max_contiguous(b_address, [1, 8]), [1, 16]))
        else:
            is_rank = lane < (ranks & 0xFF)[None, :, None]
            has_v = tl.reshape(is_own & is_rank, (BLOCK_M, BLOCK_R))
            is_rank = tl.broadcast_to(is_rank, (BLOCK_N, GROUPS, 8))
            b = tl.load(b_address.to(tl.pointer_type(DTYPE)), mask=is_rank, other=0.0)
            b = tl.reshape(b, (BLOCK_N, BLOCK_R))
        v = tl.load(v_address, mask=has_v, other=0.0)
        for _ in tl.static_range(V_SPLIT_K - 1):
            v_address += stride_vk
            v += tl.load(v_address, mask=has_v, other=0.0)
        v = v.to(DTYPE)
        if IS_SWAPPED:
            acc = add_product(acc, b, v.T, num_groups > 0, PRECISION)
        else:
            acc = add_product(acc, v, b.T, num_groups > 0, PRECISION)
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
