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
def find_first_groups(
    entries_ptr, stride_el,
    stride_br,
    plan_ptr,
    tile,
    part,
    is_wanted,
    TILE_M: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    ITEM_SIZE: tl.constexpr,
):  # fmt: skip
    """The first GROUPS groups of a tile in one slice, from the entries; how many there are in all.

    The same four fields that the shrink notes, for programs that want them before it has. Where
    there are fewer groups, the rest have place -2 and no ranks.
    """
    place = tl.arange(0, PLACES)
    plan = plan_ptr + tile * (16 + 4 * TILE_M)
    is_place = is_wanted & (place < tl.load(plan))
    slot = tl.load(plan + 16 + place, mask=is_place, other=0)
    entry_ptr = entries_ptr + slot.to(tl.int64) * stride_el + part * ENTRY_FIELDS
    b_ptr = tl.load(entry_ptr + 2, mask=is_place, other=0)
    stride_bn = tl.load(entry_ptr + 3, mask=is_place, other=0)
    rank = tl.load(entry_ptr + 4, mask=is_place, other=0).to(tl.int32)
    own = (rank + 7) // 8
    end = tl.cumsum(own, axis=0)
    begin = end - own
    number = tl.arange(0, GROUPS)[:, None] - begin[None, :]
    is_here = (number >= 0) & (number < own[None, :])
    b_group = b_ptr[None, :] + number.to(tl.int64) * (8 * ITEM_SIZE) * stride_br
    address = tl.sum(tl.where(is_here, b_group, 0), axis=1)
    stride = tl.sum(tl.where(is_here, stride_bn[None, :], 0), axis=1)
    places = tl.sum(tl.where(is_here, place[None, :] + 2, 0), axis=1) - 2
    first = tl.sum(tl.where(is_here, number * 8, 0), axis=1)
    valid = tl.sum(tl.where(is_here, tl.minimum(rank[None, :] - number * 8, 8), 0), axis=1)
    return address, stride, places, (first << 8) | valid, tl.sum(own, axis=0)


@triton.jit
def load_v(
    v_ptr, stride_vk, stride_vm, stride_vs,
    row,
    row_place,
    part,
    place,
    ranks,
    V_SPLIT_K: tl.constexpr,
    V_GROUPS: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """v [BLOCK_M, BLOCK_R] of one block of groups, zero where a group is not the row's own.

    Several planes of few ranks (V_GROUPS groups of 8) are added up row by row and dealt out to
    their groups then; one plane is loaded in place, which can happen asynchronously.
    """
    GROUPS: tl.constexpr = BLOCK_R // 8
    # whole groups of 8, which the compiler sees by this: a hint on an argument would be lost
    stride_vk = stride_vk // 8 * 8
    lane = tl.arange(0, 8)[None, None, :]
    is_own = row_place[:, None, None] == place[None, :, None]
    if RANK_MULTIPLE == 8:
        is_own = tl.broadcast_to(is_own, (BLOCK_M, GROUPS, 8))
    else:
        is_own = is_own & (lane < (ranks & 0xFF)[None, :, None])
    v_row = part * stride_vs + row * stride_vm
    if V_SPLIT_K > 1 and V_GROUPS <= 4:
        v = tl.zeros((BLOCK_M, GROUPS, 8), DTYPE)
        for group in tl.static_range(V_GROUPS):
            own_address = v_ptr + (v_row[:, None] + (group * 8 + tl.arange(0, 8))[None, :])
            has_own = (row_place >= 0)[:, None]
            own = tl.load(own_address, mask=has_own, other=0.0)
            for _ in tl.static_range(V_SPLIT_K - 1):
                own_address += stride_vk
                own += tl.load(own_address, mask=has_own, other=0.0)
            is_here = is_own & (ranks >> 11 == group)[None, :, None]
            v = tl.where(is_here, own.to(DTYPE)[:, None, :], v)
        v = tl.reshape(v, (BLOCK_M, BLOCK_R))
    else:
        v_offset = v_row[:, None, None] + (ranks >> 8)[None, :, None] + lane
        v_address = v_ptr + tl.reshape(v_offset, (BLOCK_M, BLOCK_R))
        has_v = tl.reshape(is_own, (BLOCK_M, BLOCK_R))
        if RANK_MULTIPLE == 8:
            v_address = tl.multiple_of(tl.max_contiguous(v_address, [1, 8]), [1, 16])
            has_v = tl.max_constancy(has_v, [1, 8])
        v = tl.load(v_address, mask=has_v, other=0.0)
        for _ in tl.static_range(V_SPLIT_K - 1):
            v_address += stride_vk
            v += tl.load(v_address, mask=has_v, other=0.0)
    return v.to(DTYPE)


@triton.jit
def load_b(
    address,
    stride_bn,
    ranks,
    stride_br,
    column,
    RANK_MULTIPLE: tl.constexpr,
    IS_FULL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows ``column`` of B for one block of groups [BLOCK_N, BLOCK_R].

    IS_FULL: every group is one, or repeats one. Else those without ranks are zeros.
    """
    GROUPS: tl.constexpr = BLOCK_R // 8
    ITEM_SIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    lane = tl.arange(0, 8)[None, None, :]
    b_address = address[None, :, None] + ITEM_SIZE * (
        column[:, None, None] * stride_bn[None, :, None] + lane.to(tl.int64) * stride_br
    )
    if RANK_MULTIPLE == 8:
        b_address = tl.reshape(b_address, (BLOCK_N, BLOCK_R)).to(tl.pointer_type(DTYPE))
        b_address = tl.multiple_of(tl.max_contiguous(b_address, [1, 8]), [1, 16])
        if IS_FULL:
            b = tl.load(b_address)
        else:
            has_b = tl.broadcast_to((ranks & 0xFF)[None, :, None] > 0, (BLOCK_N, GROUPS, 8))
            has_b = tl.max_constancy(tl.reshape(has_b, (BLOCK_N, BLOCK_R)), [1, 8])
            b = tl.load(b_address, mask=has_b, other=0.0)
    else:
        is_rank = tl.broadcast_to(lane < (ranks & 0xFF)[None, :, None], (BLOCK_N, GROUPS, 8))
        b = tl.load(b_address.to(tl.pointer_type(DTYPE)), mask=is_rank, other=0.0)
        b = tl.reshape(b, (BLOCK_N, BLOCK_R))
    return b


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
    first_block,
    V_SPLIT_K: tl.constexpr,
    V_GROUPS: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc += v B^T over the adapters of a tile, each row with its own, from one block of groups on.

    acc [BLOCK_M, BLOCK_N], or its transpose if swapped; v [V_SPLIT_K, M, S, R] holds the
    scaling; row and column are int64 and in range, column counts within the slice ``part``.
    """
    GROUPS: tl.constexpr = BLOCK_R // 8
    group_ptr = groups_ptr + tile.to(tl.int64) * stride_gt + part * stride_gs
    group_ptr += (first_block * GROUPS + tl.arange(0, GROUPS)) * GROUP_FIELDS
    for _ in tl.range(first_block, tl.cdiv(num_groups, GROUPS), num_stages=STAGES):
        address = tl.load(group_ptr)
        stride_bn = tl.load(group_ptr + 1)
        place = tl.load(group_ptr + 2)
        ranks = tl.load(group_ptr + 3)
        group_ptr += GROUPS * GROUP_FIELDS
        b = load_b(
            address, stride_bn, ranks, stride_br, column,
            RANK_MULTIPLE, True, BLOCK_N, BLOCK_R, DTYPE,
        )  # fmt: skip
        v = load_v(
            v_ptr, stride_vk, stride_vm, stride_vs, row, row_place, part, place, ranks,
            V_SPLIT_K, V_GROUPS, RANK_MULTIPLE, BLOCK_M, BLOCK_R, DTYPE,
        )  # fmt: skip
        acc = add_expand(acc, v, b, num_groups > 0, IS_SWAPPED, PRECISION)
    return acc


@triton.jit
def held(tile, is_real):
    """The tile, in registers until here.

    A tile that goes straight from its load to a dot is moved to shared memory next to the load,
    where the program then waits for it. ``is_real`` is true, but only known when the kernel runs.
    """
    return tl.where(is_real, tile, 0.0)


@triton.jit
def add_expand(acc, v, b, is_real, IS_SWAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """acc + v B^T, or its transpose."""
    if IS_SWAPPED:
        acc = add_product(acc, b, v.T, is_real, PRECISION)
    else:
        acc = add_product(acc, v, b.T, is_real, PRECISION)
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


@triton.jit
def store_tile(
    acc,
    y_ptr, stride_ym, stride_yn,
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
    """Finish rows of one slice and write those that exist, in the dtype of y."""
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
