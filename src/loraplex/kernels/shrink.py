"""v = x A^T for tokens of many adapters: a program per item, i.e. some rows of one adapter.

Only the item's own rows of x are read, so the bytes follow what occurs. Two forms of the result:
planes of partial sums for a consumer that adds them up (:func:`shrink_kernel`), and v in the
activation dtype, block-diagonal over the adapters of a tile, for a consumer that reads v as if it
were more columns of x (:func:`shrink_wide_kernel`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraplex.kernels.tile import ENTRY_FIELDS


@triton.jit
def load_item(plan_ptr, tile, item, TILE_M: tl.constexpr, ITEM_M: tl.constexpr):
    """Place, whether it is the place's first item, rows [ITEM_M] and which of them are real."""
    plan = plan_ptr + tile * (16 + 3 * TILE_M)
    packed = tl.load(plan + 16 + 2 * TILE_M + item)
    start = (packed >> 8) & 0x7F
    lane = tl.arange(0, ITEM_M)
    has_row = lane < (packed & 0xFF)
    row = tl.load(plan + 16 + TILE_M + start + lane, mask=has_row, other=0)
    return packed >> 16, (packed >> 15) & 1, row, has_row


@triton.jit
def shrink_rows(
    acc,
    x_ptr, stride_xm, stride_xk,
    entry_ptr,
    stride_ak,
    row, has_row,
    rank_index, rank,
    split,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [ITEM_M, BLOCK_R] += x[row] A[rank_index]^T over one part of K."""
    # blocks of K are counted whole, so that every part begins at an aligned offset
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    a_ptr = tl.load(entry_ptr).to(tl.pointer_type(x_ptr.dtype.element_ty))
    stride_ar = tl.load(entry_ptr + 1)
    if RANK_MULTIPLE == 8:
        a_ptr = tl.multiple_of(a_ptr, 16)
        stride_ar = tl.multiple_of(stride_ar, 8)
    x_row = x_ptr + row.to(tl.int64)[:, None] * stride_xm
    a_row = a_ptr + rank_index.to(tl.int64)[:, None] * stride_ar
    first = split * STEPS * BLOCK_K
    for step in range(STEPS):
        k = first + step * BLOCK_K + tl.arange(0, BLOCK_K)
        x_mask = has_row[:, None]
        a_mask = (rank_index < rank)[:, None]
        if K % (BLOCK_K * SPLIT_K) != 0:
            x_mask = x_mask & (k < K)[None, :]
            a_mask = a_mask & (k < K)[None, :]
        offset = k.to(tl.int64)[None, :]
        x = tl.load(x_row + offset * stride_xk, mask=x_mask, other=0.0)
        a = tl.load(a_row + offset * stride_ak, mask=a_mask, other=0.0)
        acc = tl.dot(x, a.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def shrink_kernel(
    x_ptr, stride_xm, stride_xk,
    entries_ptr, stride_el,
    stride_ak,
    plan_ptr,
    partial_ptr, stride_pk, stride_pm, stride_ps,
    num_items,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    TILE_M: tl.constexpr,
    ITEM_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """partial[k, m, s, :rank] = x[m, K_k] @ A[slot(m), s][:rank, K_k]^T in float32.

    x [M, K]; partial [SPLIT_K, M, S, R_max]; base rows and ranks past an adapter's own stay
    unwritten.
    """
    # which item, which slice and ranks, which part of K
    tile = tl.program_id(0) // num_items
    item = tl.program_id(0) % num_items
    part = tl.program_id(1) // RANK_BLOCKS
    rank_index = tl.program_id(1) % RANK_BLOCKS * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    plan = plan_ptr + tile * (16 + 3 * TILE_M)
    if item >= tl.load(plan + 1):
        return
    place, _, row, has_row = load_item(plan_ptr, tile, item, TILE_M, ITEM_M)
    if place >= tl.load(plan):
        return

    # which adapter
    slot = tl.load(plan + 16 + place)
    entry_ptr = entries_ptr + slot.to(tl.int64) * stride_el + part * ENTRY_FIELDS
    rank = tl.load(entry_ptr + 4).to(tl.int32)
    if tl.program_id(1) % RANK_BLOCKS * BLOCK_R >= rank:
        return

    acc = shrink_rows(
        tl.zeros((ITEM_M, BLOCK_R), dtype=tl.float32),
        x_ptr, stride_xm, stride_xk,
        entry_ptr,
        stride_ak,
        row, has_row, rank_index, rank, split,
        K, SPLIT_K, RANK_MULTIPLE, BLOCK_K, PRECISION,
    )  # fmt: skip
    target = partial_ptr + split.to(tl.int64) * stride_pk + part * stride_ps
    target += row.to(tl.int64)[:, None] * stride_pm + rank_index[None, :]
    tl.store(target, acc, mask=has_row[:, None] & (rank_index < rank)[None, :])


@triton.jit
def shrink_wide_kernel(
    x_ptr, stride_xm,
    entries_ptr, stride_el,
    plan_ptr,
    v_ptr, stride_vm, stride_vs,
    groups_ptr, stride_gt, stride_gs,
    arrivals_ptr,
    num_items,
    num_arrivals,
    K: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    TILE_M: tl.constexpr,
    ITEM_M: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """v[m, s] = scaling * x[m] A[slot(m), s]^T in the columns of its place, zeros beside them.

    x [M, K]; v [M, S, W], the adapters of a tile side by side in columns, as many as their ranks,
    the last block of WIDE_BLOCK columns filled up; groups [T, S, W/8, 2] = address and row stride
    of the 8 columns of B that belong to each 8 columns of v. The counters that the consumer's
    programs meet at are set to zero.
    """
    # x is final before this kernel lets its consumer start, which reads x without waiting
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(0) // num_items
    item = tl.program_id(0) % num_items
    part = tl.program_id(1) // RANK_BLOCKS
    rank_block = tl.program_id(1) % RANK_BLOCKS
    if tl.program_id(0) + tl.program_id(1) == 0:
        for first in range(0, num_arrivals, 128):
            lane = first + tl.arange(0, 128)
            tl.store(arrivals_ptr + lane, tl.zeros((128,), tl.int32), mask=lane < num_arrivals)
    plan = plan_ptr + tile * (16 + 3 * TILE_M)
    if item >= tl.load(plan + 1):
        return
    place, is_first, row, has_row = load_item(plan_ptr, tile, item, TILE_M, ITEM_M)

    # where this adapter's columns are among those of the tile
    lane = tl.arange(0, PLACES)
    is_place = lane < tl.load(plan)
    slots = tl.load(plan + 16 + lane, mask=is_place, other=0)
    rank_ptr = entries_ptr + slots.to(tl.int64) * stride_el + part * ENTRY_FIELDS + 4
    ranks = tl.load(rank_ptr, mask=is_place, other=0).to(tl.int32)
    total = tl.sum(ranks, axis=0)
    first = tl.sum(tl.where(lane < place, ranks, 0), axis=0)
    rank = tl.sum(tl.where(lane == place, ranks, 0), axis=0)
    slot = tl.sum(tl.where(lane == place, slots, 0), axis=0)
    end = (total + WIDE_BLOCK - 1) // WIDE_BLOCK * WIDE_BLOCK
    entry_ptr = entries_ptr + slot.to(tl.int64) * stride_el + part * ENTRY_FIELDS
    v_row = v_ptr + row.to(tl.int64)[:, None] * stride_vm + part * stride_vs

    if rank_block == 0:
        # zeros beside the adapter's own columns
        for column_first in range(0, end, WIDE_BLOCK):
            column = column_first + tl.arange(0, WIDE_BLOCK)
            is_beside = (column < first) | (column >= first + rank)
            zero = tl.zeros((ITEM_M, WIDE_BLOCK), v_ptr.dtype.element_ty)
            tl.store(v_row + column[None, :], zero, mask=has_row[:, None] & is_beside[None, :])
        # addresses of B; the columns past the last adapter repeat its last, v is zero there
        if (is_first == 1) & (rank > 0):
            b_ptr = tl.load(entry_ptr + 2)
            stride_bn = tl.load(entry_ptr + 3)
            is_last = first + rank == total
            group = tl.arange(0, GROUPS)
            last = tl.where(is_last, end - first, rank) // 8
            address = b_ptr + tl.minimum(group, rank // 8 - 1).to(tl.int64) * 16
            target = groups_ptr + tile.to(tl.int64) * stride_gt + part * stride_gs
            target += (first // 8 + group) * 2
            tl.store(target, address, mask=group < last)
            tl.store(target + 1, tl.zeros((GROUPS,), tl.int64) + stride_bn, mask=group < last)
    if rank_block * BLOCK_R >= rank:
        return

    rank_index = rank_block * BLOCK_R + tl.arange(0, BLOCK_R)
    acc = shrink_rows(
        tl.zeros((ITEM_M, BLOCK_R), dtype=tl.float32),
        x_ptr, stride_xm, 1,
        entry_ptr,
        1,
        row, has_row, rank_index, rank, 0,
        K, 1, 8, BLOCK_K, "ieee",
    )  # fmt: skip
    scaling = tl.load(entry_ptr + 5).to(tl.int32).to(tl.float32, bitcast=True)
    v = (acc * scaling).to(v_ptr.dtype.element_ty)
    target = v_row + first + rank_index[None, :]
    tl.store(target, v, mask=has_row[:, None] & (rank_index < rank)[None, :])


def launch_shrink(
    x,
    entries,
    stride_ak,
    plan,
    partial,
    *,
    tile_m,
    item_m,
    num_items,
    rank_multiple,
    precision,
    block_r,
    block_k,
    num_warps,
    num_stages,
):
    """Fill ``partial`` [SPLIT_K, M, S, R_max] for the rows and ranks that have an adapter."""
    num_tokens, in_features = x.shape
    split_k, _, num_slices, max_rank = partial.shape
    rank_blocks = triton.cdiv(max_rank, block_r)
    grid = (triton.cdiv(num_tokens, tile_m) * num_items, num_slices * rank_blocks, split_k)
    shrink_kernel[grid](
        x, x.stride(0), x.stride(1),
        entries, entries.stride(0),
        stride_ak,
        plan,
        partial, partial.stride(0), partial.stride(1), partial.stride(2),
        num_items,
        K=in_features,
        SPLIT_K=split_k,
        RANK_MULTIPLE=rank_multiple,
        RANK_BLOCKS=rank_blocks,
        TILE_M=tile_m,
        ITEM_M=item_m,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        PRECISION=precision,
        num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip


def launch_shrink_wide(
    x,
    entries,
    plan,
    v,
    groups,
    arrivals,
    *,
    tile_m,
    item_m,
    num_items,
    num_places,
    max_rank,
    wide_block,
    is_dependent,
    block_r,
    block_k,
    num_warps,
    num_stages,
):
    """Fill ``v`` [M, S, W] and ``groups`` [T, S, W/8, 2], and set ``arrivals`` to zero."""
    num_tokens, in_features = x.shape
    num_slices = v.shape[1]
    rank_blocks = triton.cdiv(max_rank, block_r)
    grid = (triton.cdiv(num_tokens, tile_m) * num_items, num_slices * rank_blocks)
    launch = {"launch_pdl": True} if is_dependent else {}
    shrink_wide_kernel[grid](
        x, x.stride(0),
        entries, entries.stride(0),
        plan,
        v, v.stride(0), v.stride(1),
        groups, groups.stride(0), groups.stride(1),
        arrivals,
        num_items,
        arrivals.numel(),
        K=in_features,
        RANK_BLOCKS=rank_blocks,
        TILE_M=tile_m,
        ITEM_M=item_m,
        PLACES=num_places,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        GROUPS=triton.next_power_of_2((max_rank + wide_block) // 8),
        WIDE_BLOCK=wide_block,
        PDL=is_dependent,
        num_warps=num_warps,
        num_stages=num_stages,
        **launch,
    )  # fmt: skip
