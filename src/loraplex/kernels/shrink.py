"""v = x A^T for tokens of many adapters, split along K into planes."""

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.tile import ENTRY_FIELDS, load_places, locate_columns


@triton.jit
def shrink_kernel(
    x_ptr, stride_xm, stride_xk,
    entries_ptr, stride_el,
    stride_ak,
    places_ptr,
    slots_ptr,
    counts_ptr,
    partial_ptr, stride_pk, stride_pm, stride_ps,
    num_tokens,
    num_slices,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    TILE_M: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """partial[k, m, s, :rank] = x[m, K_k] @ A[slot(m), s][:rank, K_k]^T in float32.

    x [M, K]; partial [SPLIT_K, M, S, R_max]; ranks past an adapter's own stay unwritten.
    """
    # which rows, which slice, which part of K, which columns
    split = tl.program_id(0)
    part = tl.program_id(1) % num_slices
    row_block = tl.program_id(1) // num_slices
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_R)

    # which adapters
    tile = row_block * BLOCK_M // TILE_M
    slot, ends = load_places(
        entries_ptr, stride_el, slots_ptr, counts_ptr, tile, part, TILE_M, PLACES
    )
    row_place = tl.load(places_ptr + row, mask=row < num_tokens, other=-1)
    total = tl.max(ends, axis=0) * 16

    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    for first in range(tl.program_id(2) * BLOCK_R, total, tl.num_programs(2) * BLOCK_R):
        place, its_slot, rank_index = locate_columns(slot, ends, first + lane, PLACES)
        entry_ptr = entries_ptr + its_slot.to(tl.int64) * stride_el + part * ENTRY_FIELDS
        is_adapter = place < PLACES
        rank = tl.load(entry_ptr + 4, mask=is_adapter, other=0).to(tl.int32)
        a_ptr = tl.load(entry_ptr, mask=is_adapter, other=0)
        stride_ar = tl.load(entry_ptr + 1, mask=is_adapter, other=0)
        is_rank = rank_index < rank
        a_row = a_ptr.to(tl.pointer_type(x_ptr.dtype.element_ty)) + rank_index * stride_ar
        if RANK_MULTIPLE == 8:
            a_row = tl.multiple_of(a_row, 16)

        # only the rows of a block that use these columns matter; others give numbers nobody keeps
        x_row = x_ptr + row.to(tl.int64)[:, None] * stride_xm
        acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for step in range(STEPS):
            k = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
            in_k = k < K
            x = tl.load(
                x_row + k.to(tl.int64)[None, :] * stride_xk,
                mask=(row < num_tokens)[:, None] & in_k[None, :],
                other=0.0,
            )
            a = tl.load(
                a_row[None, :] + k.to(tl.int64)[:, None] * stride_ak,
                mask=is_rank[None, :] & in_k[:, None],
                other=0.0,
            )
            acc = tl.dot(x, a, acc, input_precision=PRECISION)

        target = partial_ptr + split.to(tl.int64) * stride_pk + part * stride_ps
        target += row.to(tl.int64)[:, None] * stride_pm + rank_index[None, :]
        is_own = (row_place[:, None] == place[None, :]) & is_rank[None, :]
        tl.store(target, acc, mask=is_own)


def launch_shrink(
    x,
    entries,
    stride_ak,
    places,
    slots,
    counts,
    partial,
    *,
    rank_multiple,
    num_places,
    precision,
    block_m,
    block_r,
    block_k,
    column_programs,
    num_warps,
    num_stages,
):
    """Fill ``partial`` [SPLIT_K, M, S, R_max] for the rows and ranks that have an adapter."""
    num_tokens, in_features = x.shape
    split_k, _, num_slices, _ = partial.shape
    grid = (split_k, triton.cdiv(num_tokens, block_m) * num_slices, column_programs)
    shrink_kernel[grid](
        x, x.stride(0), x.stride(1),
        entries, entries.stride(0),
        stride_ak,
        places,
        slots,
        counts,
        partial, partial.stride(0), partial.stride(1), partial.stride(2),
        num_tokens,
        num_slices,
        K=in_features,
        SPLIT_K=split_k,
        RANK_MULTIPLE=rank_multiple,
        TILE_M=slots.shape[1],
        PLACES=num_places,
        BLOCK_M=block_m,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        PRECISION=precision,
        num_warps=num_warps,
        num_stages=num_stages,
    )  # fmt: skip
