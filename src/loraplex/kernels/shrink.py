"""v = x A^T for tokens of many adapters: a program per item, i.e. some rows of one adapter.

Only the item's own rows of x are read, so the bytes follow what occurs. The product is so narrow
that one chain of dependent matrix instructions would take longer than its loads: K is dealt out to
LANES of them, a warp or more each, and to SPLIT_K programs, whose planes the consumer adds up in
order. Before the first load of x stand two rounds of loads that depend on each other, item and
entry; each costs the latency of the cache, so nothing is branched on in between.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraplex.kernels.launch import launch
from loraplex.kernels.tile import ENTRY_FIELDS, GROUP_FIELDS, add_product


@triton.jit
def shrink_rows(
    x_ptr, stride_xm, stride_xk,
    a_ptr, stride_ar, stride_ak,
    row, has_row,
    rank_index, rank,
    split,
    is_real,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    ITEM_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x[row] A[rank_index]^T [ITEM_M, BLOCK_R] over one part of K, in float32."""
    # blocks of K are counted whole, so that every part begins at an aligned offset
    STEP: tl.constexpr = BLOCK_K * LANES
    STEPS: tl.constexpr = (K + STEP * SPLIT_K - 1) // (STEP * SPLIT_K)
    x_row = x_ptr + row.to(tl.int64)[None, :, None] * stride_xm
    a_row = a_ptr + rank_index.to(tl.int64)[None, :, None] * stride_ar
    lane_k = tl.arange(0, LANES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    acc = tl.zeros((LANES, ITEM_M, BLOCK_R), dtype=tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        k = (split * STEPS + step) * STEP + lane_k
        x_mask = has_row[None, :, None]
        a_mask = (rank_index < rank)[None, :, None]
        if K % (STEP * SPLIT_K) != 0:
            x_mask = x_mask & (k < K)
            a_mask = a_mask & (k < K)
        x = tl.load(x_row + k.to(tl.int64) * stride_xk, mask=x_mask, other=0.0)
        a = tl.load(a_row + k.to(tl.int64) * stride_ak, mask=a_mask, other=0.0)
        acc = add_product(acc, x, tl.permute(a, (0, 2, 1)), is_real, PRECISION)
    return tl.sum(acc, axis=0)


@triton.jit
def write_groups(
    groups_ptr, stride_gt, stride_gs,
    entries_ptr, stride_el,
    stride_br,
    plan_ptr,
    tile,
    part,
    TILE_M: tl.constexpr,
    PLACES: tl.constexpr,
    FILL: tl.constexpr,
    ITEM_SIZE: tl.constexpr,
):  # fmt: skip
    """The groups of all adapters of one tile; the last block of FILL groups is filled up."""
    place = tl.arange(0, PLACES)
    plan = plan_ptr + tile * (16 + 4 * TILE_M)
    is_place = place < tl.load(plan)
    slot = tl.load(plan + 16 + place, mask=is_place, other=0)
    entry_ptr = entries_ptr + slot.to(tl.int64) * stride_el + part * ENTRY_FIELDS
    b_ptr = tl.load(entry_ptr + 2, mask=is_place, other=0)
    stride_bn = tl.load(entry_ptr + 3, mask=is_place, other=0)
    rank = tl.load(entry_ptr + 4, mask=is_place, other=0).to(tl.int32)
    own = (rank + 7) // 8
    end = tl.cumsum(own, axis=0)
    total = tl.sum(own, axis=0)
    no_offset = tl.zeros((PLACES,), tl.int64)
    target = groups_ptr + tile.to(tl.int64) * stride_gt + part * stride_gs
    for group in range(tl.max(own, axis=0)):
        is_mine = group < own
        group_ptr = target + (end - own + group) * GROUP_FIELDS
        valid = tl.minimum(rank - group * 8, 8)
        tl.store(group_ptr, b_ptr + (no_offset + group) * (8 * ITEM_SIZE) * stride_br, mask=is_mine)
        tl.store(group_ptr + 1, stride_bn, mask=is_mine)
        tl.store(group_ptr + 2, place.to(tl.int64), mask=is_mine)
        tl.store(group_ptr + 3, ((group * 8 << 8) | valid).to(tl.int64), mask=is_mine)

    # groups that fill up repeat the first columns of the last adapter: finite, and v is zero there
    is_last = (end == total) & (own > 0)
    last_b = tl.sum(tl.where(is_last, b_ptr, 0), axis=0)
    last_stride = tl.sum(tl.where(is_last, stride_bn, 0), axis=0)
    last_valid = tl.sum(tl.where(is_last, tl.minimum(rank, 8), 0), axis=0)
    filler = tl.arange(0, FILL)
    needs = filler < (total + FILL - 1) // FILL * FILL - total
    fill_ptr = target + (total + filler) * GROUP_FIELDS
    zero = tl.zeros((FILL,), tl.int64)
    tl.store(fill_ptr, zero + last_b, mask=needs)
    tl.store(fill_ptr + 1, zero + last_stride, mask=needs)
    tl.store(fill_ptr + 2, zero - 2, mask=needs)
    tl.store(fill_ptr + 3, zero + last_valid.to(tl.int64), mask=needs)


@triton.jit
def reset_arrivals(arrivals_ptr, num_arrivals):
    """One program of all sets the consumer's counters to zero."""
    is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
    if is_first:
        for first in range(0, num_arrivals, 128):
            counter = first + tl.arange(0, 128)
            tl.store(arrivals_ptr + counter, tl.zeros((128,), tl.int32), counter < num_arrivals)


@triton.jit
def shrink_program(
    x_ptr, stride_xm, stride_xk,
    entries_ptr, stride_el,
    stride_ak,
    stride_br,
    plan_ptr,
    v_ptr, stride_vk, stride_vm, stride_vs,
    groups_ptr, stride_gt, stride_gs,
    tile_item,
    slice_block,
    split,
    num_items,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    TILE_M: tl.constexpr,
    ITEM_M: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    FILL: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One item's block of v, or one tile's groups: the share of one program of the shrink.

    ``tile_item`` counts items, with one more per tile for its groups; ``slice_block`` counts blocks
    of ranks, slice by slice; ``split`` is the part of K.
    """
    tile = tile_item // (num_items + 1)
    item = tile_item % (num_items + 1)
    part = slice_block // RANK_BLOCKS
    rank_block = slice_block % RANK_BLOCKS
    plan = plan_ptr + tile * (16 + 4 * TILE_M)
    if item == num_items:
        # one program per tile and slice says where the B are
        if (rank_block == 0) & (split == 0):
            ITEM_SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
            write_groups(
                groups_ptr, stride_gt, stride_gs,
                entries_ptr, stride_el,
                stride_br,
                plan_ptr,
                tile, part,
                TILE_M, PLACES, FILL, ITEM_SIZE,
            )  # fmt: skip
    else:
        # which item: rows of which adapter
        is_item = item < tl.load(plan + 1)
        packed = tl.load(plan + 16 + 2 * TILE_M + item)
        slot = tl.load(plan + 16 + 3 * TILE_M + item)
        is_item = is_item & (slot >= 0)
        lane = tl.arange(0, ITEM_M)
        has_row = lane < (packed & 0xFF)
        row = tl.load(plan + 16 + TILE_M + (packed >> 8) + lane, mask=has_row, other=0)

        # which weights
        entry_ptr = entries_ptr + slot.to(tl.int64) * stride_el + part * ENTRY_FIELDS
        a_ptr = tl.load(entry_ptr, mask=is_item, other=0)
        a_ptr = a_ptr.to(tl.pointer_type(x_ptr.dtype.element_ty))
        stride_ar = tl.load(entry_ptr + 1, mask=is_item, other=0)
        # said here, next to the loads: a hint on an argument of a nested function is lost
        if RANK_MULTIPLE == 8:
            a_ptr = tl.multiple_of(a_ptr, 16)
            stride_ar = tl.multiple_of(stride_ar, 8)
        rank = tl.load(entry_ptr + 4, mask=is_item, other=0).to(tl.int32)
        scaling = tl.load(entry_ptr + 5, mask=is_item, other=0).to(tl.int32)
        scaling = scaling.to(tl.float32, bitcast=True)
        if rank_block * BLOCK_R < rank:
            rank_index = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
            acc = shrink_rows(
                x_ptr, stride_xm, stride_xk,
                a_ptr, stride_ar, stride_ak,
                row, has_row, rank_index, rank, split, is_item,
                K, SPLIT_K, ITEM_M, BLOCK_R, BLOCK_K, LANES, STAGES, PRECISION,
            )  # fmt: skip
            # scaled before rounding, so that a large x A^T with a small scale stays finite
            # planes are whole groups of 8, which the compiler sees by this
            target = v_ptr + split.to(tl.int64) * (stride_vk // 8 * 8) + part * stride_vs
            target += row.to(tl.int64)[:, None] * stride_vm + rank_index[None, :]
            v = (acc * scaling).to(v_ptr.dtype.element_ty)
            tl.store(target, v, mask=has_row[:, None] & (rank_index < rank)[None, :])


@triton.jit(do_not_specialize=["stride_vk", "num_items", "num_arrivals"])
def shrink_kernel(
    x_ptr, stride_xm, stride_xk,
    entries_ptr, stride_el,
    stride_ak,
    stride_br,
    plan_ptr,
    v_ptr, stride_vk, stride_vm, stride_vs,
    groups_ptr, stride_gt, stride_gs,
    arrivals_ptr,
    num_items,
    num_arrivals,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    TILE_M: tl.constexpr,
    ITEM_M: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    FILL: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """v[k, m, s, :rank] = scaling * x[m, K_k] A[slot(m), s][:, K_k]^T, and each tile's groups.

    x [M, K]; v [SPLIT_K, M, S, R], base rows and ranks past an adapter's own stay unwritten; groups
    [T, S, G, 4], see :mod:`loraplex.kernels.tile`. The counters at which the programs of the
    consumer meet are set to zero.
    """
    # x is final before the consumer may start, which reads x without waiting
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    reset_arrivals(arrivals_ptr, num_arrivals)
    shrink_program(
        x_ptr, stride_xm, stride_xk,
        entries_ptr, stride_el,
        stride_ak,
        stride_br,
        plan_ptr,
        v_ptr, stride_vk, stride_vm, stride_vs,
        groups_ptr, stride_gt, stride_gs,
        tl.program_id(0), tl.program_id(1), tl.program_id(2), num_items,
        K, SPLIT_K, RANK_MULTIPLE, RANK_BLOCKS, TILE_M, ITEM_M, PLACES, BLOCK_R, BLOCK_K, LANES,
        FILL, STAGES, PRECISION,
    )  # fmt: skip


def launch_shrink(
    x: Tensor,
    entries: Tensor,
    stride_ak: int,
    stride_br: int,
    plan: Tensor,
    v: Tensor,
    groups: Tensor,
    arrivals: Tensor,
    *,
    tile_m: int,
    item_m: int,
    num_items: int,
    num_places: int,
    max_rank: int,
    rank_multiple: int,
    fill: int,
    precision: str,
    is_dependent: bool,
    block_r: int,
    block_k: int,
    lanes: int,
    num_warps: int,
    num_stages: int,
) -> None:
    """Fill ``v`` [SPLIT_K, M, S, R] and ``groups`` [T, S, G, 4]; zero ``arrivals``."""
    num_tokens, in_features = x.shape
    rank_blocks = -(-max_rank // block_r)
    split_k, _, num_slices, _ = v.shape
    tiles = -(-num_tokens // tile_m)
    grid = (tiles * (num_items + 1), num_slices * rank_blocks, split_k)
    launch(
        shrink_kernel, grid,
        x, x.stride(0), x.stride(1),
        entries, entries.stride(0),
        stride_ak,
        stride_br,
        plan,
        v, v.stride(0), v.stride(1), v.stride(2),
        groups, groups.stride(0), groups.stride(1),
        arrivals,
        num_items,
        arrivals.numel(),
        K=in_features,
        SPLIT_K=split_k,
        RANK_MULTIPLE=rank_multiple,
        RANK_BLOCKS=rank_blocks,
        TILE_M=tile_m,
        ITEM_M=item_m,
        PLACES=num_places,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        LANES=lanes,
        FILL=fill,
        STAGES=num_stages,
        PDL=is_dependent,
        PRECISION=precision,
        num_warps=num_warps,
        num_stages=num_stages,
        **({"launch_pdl": True} if is_dependent else {}),
    )  # fmt: skip
