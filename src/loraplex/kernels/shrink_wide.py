"""v = x A^T at prefill: a program takes all slices and ranks of an item side by side.

With 64 rows of one adapter the product is wide enough for one chain of large matrix instructions
if the slices stand beside each other: columns are numbered slice by slice, as v has them, and x is
read once for all columns of a block instead of once per slice. Which row of which A a column is
gets looked up column by column, so that the chain of dependent loads stays as short as for one
slice: plan, entries, data.

How many items a tile has is known on the GPU only, and at prefill nearly all of those it could have
are none. A program for each would cost more than the product, so a few programs a tile share them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraplex.kernels.launch import launch
from loraplex.kernels.shrink import reset_arrivals, write_groups
from loraplex.kernels.tile import ENTRY_FIELDS, add_product

# About what a GPU holds at a time, and no fewer of a tile than it usually has items.
PROGRAMS = 256
LEAST_PROGRAMS_OF_TILE = 4


@triton.jit
def wide_rows(
    x_ptr, stride_xm, stride_xk,
    address, stride_ak,
    row, has_row,
    is_live,
    split,
    is_real,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    ITEM_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x[row] A^T [ITEM_M, BLOCK_R] over one part of K, in float32.

    ``address`` [BLOCK_R] is where each column's row of A begins, read where ``is_live``.
    """
    ITEM_SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
    # blocks of K are counted whole, so that every part begins at an aligned offset
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    x_row = x_ptr + row.to(tl.int64)[:, None] * stride_xm
    acc = tl.zeros((ITEM_M, BLOCK_R), dtype=tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        k = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        x_mask = has_row[:, None]
        a_mask = is_live[:, None]
        if K % (BLOCK_K * SPLIT_K) != 0:
            x_mask = x_mask & (k < K)[None, :]
            a_mask = a_mask & (k < K)[None, :]
        x = tl.load(x_row + k.to(tl.int64)[None, :] * stride_xk, mask=x_mask, other=0.0)
        a_tile = address[:, None] + k.to(tl.int64)[None, :] * (stride_ak * ITEM_SIZE)
        a_tile = a_tile.to(tl.pointer_type(x_ptr.dtype.element_ty))
        # said here, next to the load: elsewhere the hint is lost
        if RANK_MULTIPLE == 8:
            a_tile = tl.multiple_of(tl.max_contiguous(a_tile, [1, 8]), [1, 16])
        a = tl.load(a_tile, mask=a_mask, other=0.0)
        acc = add_product(acc, x, a.T, is_real, PRECISION)
    return acc


@triton.jit
def wide_item(
    x_ptr, stride_xm, stride_xk,
    entries_ptr, stride_el,
    stride_ak,
    order_ptr,
    v_ptr, stride_vk, stride_vm,
    packed, slot,
    column_block,
    split,
    K: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    RANKS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    ITEM_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of columns of one item's v; ``order_ptr`` are the tile's rows, see the plan."""
    lane = tl.arange(0, ITEM_M)
    has_row = lane < (packed & 0xFF)
    row = tl.load(order_ptr + (packed >> 8) + lane, mask=has_row, other=0)

    # which weights
    column = column_block * BLOCK_R + tl.arange(0, BLOCK_R)
    part = column // RANKS
    rank_index = column % RANKS
    is_column = part < NUM_SLICES
    entry_ptr = entries_ptr + slot.to(tl.int64) * stride_el + part * ENTRY_FIELDS
    a_ptr = tl.load(entry_ptr, mask=is_column, other=0)
    stride_ar = tl.load(entry_ptr + 1, mask=is_column, other=0)
    rank = tl.load(entry_ptr + 4, mask=is_column, other=0).to(tl.int32)
    scaling = tl.load(entry_ptr + 5, mask=is_column, other=0).to(tl.int32)
    scaling = scaling.to(tl.float32, bitcast=True)
    is_live = rank_index < rank
    if tl.max(is_live.to(tl.int32), axis=0) > 0:
        ITEM_SIZE: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth // 8
        acc = wide_rows(
            x_ptr, stride_xm, stride_xk,
            a_ptr + rank_index * stride_ar * ITEM_SIZE, stride_ak,
            row, has_row, is_live, split, packed > 0,
            K, SPLIT_K, RANK_MULTIPLE, ITEM_M, BLOCK_R, BLOCK_K, STAGES, PRECISION,
        )  # fmt: skip
        # scaled before rounding, so that a large x A^T with a small scale stays finite
        # planes are whole groups of 8, which the compiler sees by this
        target = v_ptr + split.to(tl.int64) * (stride_vk // 8 * 8)
        target += row.to(tl.int64)[:, None] * stride_vm + column[None, :]
        v = (acc * scaling[None, :]).to(v_ptr.dtype.element_ty)
        tl.store(target, v, mask=has_row[:, None] & is_live[None, :])


@triton.jit(do_not_specialize=["stride_vk", "num_tiles", "num_programs", "num_arrivals"])
def shrink_wide_kernel(
    x_ptr, stride_xm, stride_xk,
    entries_ptr, stride_el,
    stride_ak,
    stride_br,
    plan_ptr,
    v_ptr, stride_vk, stride_vm,
    groups_ptr, stride_gt, stride_gs,
    arrivals_ptr,
    num_tiles,
    num_programs,
    num_arrivals,
    K: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    RANKS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    TILE_M: tl.constexpr,
    ITEM_M: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FILL: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What :func:`loraplex.kernels.shrink.shrink_kernel` computes, all slices in one program.

    x [M, K]; v [SPLIT_K, M, NUM_SLICES * RANKS], whose columns are slices times ranks. Each of
    ``num_tiles`` tiles has ``num_programs`` programs for every block of columns and part of K, and
    behind them all one for each slice's groups.
    """
    # x is final before the consumer may start, which reads x without waiting
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    reset_arrivals(arrivals_ptr, num_arrivals)
    # the first items of all tiles come first: they are the ones that exist
    COLUMN_BLOCKS: tl.constexpr = (NUM_SLICES * RANKS + BLOCK_R - 1) // BLOCK_R
    column_block = tl.program_id(0) % COLUMN_BLOCKS
    split = tl.program_id(0) // COLUMN_BLOCKS % SPLIT_K
    number = tl.program_id(0) // (COLUMN_BLOCKS * SPLIT_K)
    group = tl.program_id(0) - COLUMN_BLOCKS * SPLIT_K * num_tiles * num_programs
    if group >= 0:
        write_groups(
            groups_ptr, stride_gt, stride_gs,
            entries_ptr, stride_el,
            stride_br,
            plan_ptr,
            group % num_tiles, group // num_tiles,
            TILE_M, PLACES, FILL, x_ptr.dtype.element_ty.primitive_bitwidth // 8,
        )  # fmt: skip
    else:
        first = number // num_tiles
        plan = plan_ptr + number % num_tiles * (16 + 4 * TILE_M)
        # asked for together with how many items there are, and each next one an item ahead
        item_ptr = plan + 16 + 2 * TILE_M + first
        packed = tl.load(item_ptr)
        slot = tl.load(item_ptr + TILE_M)
        for item in range(first, tl.load(plan + 1), num_programs):
            item_ptr += num_programs
            has_next = item + num_programs < TILE_M
            next_packed = tl.load(item_ptr, mask=has_next, other=0)
            next_slot = tl.load(item_ptr + TILE_M, mask=has_next, other=-1)
            if slot >= 0:
                wide_item(
                    x_ptr, stride_xm, stride_xk,
                    entries_ptr, stride_el,
                    stride_ak,
                    plan + 16 + TILE_M,
                    v_ptr, stride_vk, stride_vm,
                    packed, slot, column_block, split,
                    K, NUM_SLICES, RANKS, SPLIT_K, RANK_MULTIPLE, ITEM_M, BLOCK_R, BLOCK_K, STAGES,
                    PRECISION,
                )  # fmt: skip
            packed = next_packed
            slot = next_slot


def launch_shrink_wide(
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
    rank_multiple: int,
    fill: int,
    precision: str,
    is_dependent: bool,
    block_r: int,
    block_k: int,
    num_warps: int,
    num_stages: int,
) -> None:
    """Fill ``v`` [SPLIT_K, M, S, R], contiguous, and ``groups`` [T, S, G, 4]; zero ``arrivals``."""
    num_tokens, in_features = x.shape
    split_k, _, num_slices, ranks = v.shape
    tiles = -(-num_tokens // tile_m)
    blocks = -(-num_slices * ranks // block_r) * split_k
    programs = min(num_items, max(LEAST_PROGRAMS_OF_TILE, PROGRAMS // (tiles * blocks)))
    launch(
        shrink_wide_kernel, (tiles * (programs * blocks + num_slices),),
        x, x.stride(0), x.stride(1),
        entries, entries.stride(0),
        stride_ak,
        stride_br,
        plan,
        v, v.stride(0), v.stride(1),
        groups, groups.stride(0), groups.stride(1),
        arrivals,
        tiles,
        programs,
        arrivals.numel(),
        K=in_features,
        NUM_SLICES=num_slices,
        RANKS=ranks,
        SPLIT_K=split_k,
        RANK_MULTIPLE=rank_multiple,
        TILE_M=tile_m,
        ITEM_M=item_m,
        PLACES=num_places,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        FILL=fill,
        STAGES=num_stages,
        PDL=is_dependent,
        PRECISION=precision,
        num_warps=num_warps,
        num_stages=num_stages,
        **({"launch_pdl": True} if is_dependent else {}),
    )  # fmt: skip
