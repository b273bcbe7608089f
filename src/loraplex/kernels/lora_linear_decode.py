"""y = x W^T + scaling * v B^T for few tokens: the expand is the last K-blocks of the GEMM's loop.

The loop runs past K: there its left operand comes from v, which :func:`shrink_wide_kernel` wrote
block-diagonally over the adapters of a row tile, and its right operand from the adapters' B. The
addresses are selected per iteration, so one software pipeline covers both and never drains.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraplex.kernels.tile import ENTRY_FIELDS, finish_rows, locate_slice


@triton.jit
def lora_linear_decode_kernel(
    x_ptr, stride_xm,
    weight_ptr, stride_wn,
    bias_ptr,
    y_ptr, stride_ym,
    entries_ptr, stride_el,
    v_ptr, stride_vm, stride_vs,
    groups_ptr, stride_gt, stride_gs,
    indices_ptr,
    plan_ptr,
    planes_ptr,
    arrivals_ptr,
    num_tokens,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_COLUMN_SCALE: tl.constexpr,
    HAS_ADAPTER_BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [M, N] = column_scale * (x W^T + v B^T) + bias + adapter_bias.

    x [M, K], weight [N, K] with dense aligned rows; v [M, S, W] holds the scaling; groups
    [T, S, W/8, 2] says where B's columns are; planes [SPLIT_K, tiles, BLOCK_M * BLOCK_N] float32.
    """
    # which tile
    dtype = x_ptr.dtype.element_ty
    part, start, width, first = locate_slice(tl.program_id(0), SLICES, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = first + tl.arange(0, BLOCK_N)
    # rows and columns past the end repeat the last one: no masks in the loop
    safe_row = tl.minimum(row, num_tokens - 1).to(tl.int64)
    safe_column = tl.minimum(column, width - 1).to(tl.int64)

    # how many K-blocks: those of K, then those of the ranks of this row tile's adapters
    tile = tl.program_id(1) * BLOCK_M // TILE_M
    plan = plan_ptr + tile * (16 + 3 * TILE_M)
    lane = tl.arange(0, PLACES)
    is_place = lane < tl.load(plan)
    slot = tl.load(plan + 16 + lane, mask=is_place, other=0)
    rank_ptr = entries_ptr + slot.to(tl.int64) * stride_el + part * ENTRY_FIELDS + 4
    ranks = tl.load(rank_ptr, mask=is_place, other=0).to(tl.int32)
    BASE: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    # the mask tells the compiler that the sum is no less than BASE, so that the first loads
    # of the pipeline do not wait for the ranks
    blocks = BASE + ((tl.sum(ranks, axis=0) + BLOCK_K - 1) // BLOCK_K & 0xFFFF)
    begin = 0
    end = blocks
    if SPLIT_K > 1:
        share = (blocks + SPLIT_K - 1) // SPLIT_K
        begin = tl.program_id(2) * share
        end = tl.minimum(begin + share, blocks)

    # addresses
    k = tl.arange(0, BLOCK_K)
    x_address = x_ptr.to(tl.int64)
    v_address = (v_ptr + part * stride_vs).to(tl.int64)
    weight_address = (weight_ptr + start.to(tl.int64) * stride_wn).to(tl.int64)
    group = groups_ptr + tile.to(tl.int64) * stride_gt + part * stride_gs + k // 8 * 2

    if IS_SWAPPED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # v must be there before its first load is issued, STAGES iterations before its use
    wait_at = tl.maximum(BASE - STAGES - 1, begin)
    for block in tl.range(begin, end, num_stages=STAGES):
        if PDL:
            if block == wait_at:
                gdc_wait()
        is_lora = block >= BASE
        lora_block = block - BASE

        # x, past K: v
        left = tl.where(
            is_lora, v_address + lora_block * BLOCK_K * 2, x_address + block * BLOCK_K * 2
        )
        left_stride = tl.where(is_lora, stride_vm, stride_xm)
        left_ptr = left.to(tl.pointer_type(dtype)) + safe_row[:, None] * left_stride + k[None, :]
        left_ptr = tl.multiple_of(tl.max_contiguous(left_ptr, [1, BLOCK_K]), [1, 16])

        # weight, past K: the B of the adapters, 8 columns at a time
        group_ptr = group + lora_block * (BLOCK_K // 8 * 2)
        b_address = tl.load(group_ptr, mask=is_lora, other=0)
        b_stride = tl.load(group_ptr + 1, mask=is_lora, other=0)
        address = tl.where(
            is_lora, b_address + k % 8 * 2, weight_address + (block * BLOCK_K + k) * 2
        )
        right_stride = tl.where(is_lora, b_stride, stride_wn) * 2
        right = address[None, :] + safe_column[:, None] * right_stride[None, :]
        right_ptr = right.to(tl.pointer_type(dtype))
        right_ptr = tl.multiple_of(tl.max_contiguous(right_ptr, [1, 8]), [1, 16])

        if K % BLOCK_K == 0:
            left_tile = tl.load(left_ptr)
            right_tile = tl.load(right_ptr)
        else:
            is_inside = ((block * BLOCK_K + k) < K) | is_lora
            left_tile = tl.load(left_ptr, mask=is_inside[None, :], other=0.0)
            right_tile = tl.load(right_ptr, mask=is_inside[None, :], other=0.0)
        if IS_SWAPPED:
            acc = tl.dot(right_tile, left_tile.T, acc)
        else:
            acc = tl.dot(left_tile, right_tile.T, acc)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    if SPLIT_K > 1:
        # the last program of a tile to arrive adds the planes up, in a fixed order
        tile_id = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        num_tiles = tl.num_programs(0) * tl.num_programs(1)
        if IS_SWAPPED:
            inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        else:
            inner = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        plane = planes_ptr + tile_id.to(tl.int64) * (BLOCK_M * BLOCK_N) + inner
        stride_plane = num_tiles.to(tl.int64) * (BLOCK_M * BLOCK_N)
        tl.store(plane + tl.program_id(2) * stride_plane, acc)
        # every warp has stored before one thread tells
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + tile_id, 1, sem="acq_rel", scope="gpu") < SPLIT_K - 1:
            return
        acc = tl.load(plane)
        for _ in tl.static_range(SPLIT_K - 1):
            plane += stride_plane
            acc += tl.load(plane)

    if IS_SWAPPED:
        acc = acc.T
    acc = finish_rows(
        acc,
        entries_ptr, stride_el,
        indices_ptr,
        bias_ptr,
        num_tokens, row, column, part, start, width,
        HAS_BIAS, HAS_COLUMN_SCALE, HAS_ADAPTER_BIAS,
    )  # fmt: skip
    target = y_ptr + row.to(tl.int64)[:, None] * stride_ym + (start + column)[None, :]
    tl.store(target, acc.to(dtype), mask=(row < num_tokens)[:, None] & (column < width)[None, :])


def launch_lora_linear_decode(
    x,
    weight,
    bias,
    y,
    entries,
    v,
    groups,
    indices,
    plan,
    planes,
    arrivals,
    *,
    slices,
    has_column_scale,
    has_adapter_bias,
    tile_m,
    num_places,
    split_k,
    is_dependent,
    block_m,
    block_n,
    block_k,
    is_swapped,
    num_warps,
    num_stages,
):
    """Write ``y`` [M, N] from what :func:`launch_shrink_wide` left in ``v`` and ``groups``."""
    num_tokens, in_features = x.shape
    column_blocks = sum(triton.cdiv(width, block_n) for width in slices)
    launch = {"launch_pdl": True} if is_dependent else {}
    lora_linear_decode_kernel[(column_blocks, triton.cdiv(num_tokens, block_m), split_k)](
        x, x.stride(0),
        weight, weight.stride(0),
        bias if bias is not None else y,
        y, y.stride(0),
        entries, entries.stride(0),
        v, v.stride(0), v.stride(1),
        groups, groups.stride(0), groups.stride(1),
        indices,
        plan,
        planes,
        arrivals,
        num_tokens,
        K=in_features,
        SLICES=slices,
        SPLIT_K=split_k,
        HAS_BIAS=bias is not None,
        HAS_COLUMN_SCALE=has_column_scale,
        HAS_ADAPTER_BIAS=has_adapter_bias,
        TILE_M=tile_m,
        PLACES=num_places,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        IS_SWAPPED=is_swapped,
        STAGES=num_stages,
        PDL=is_dependent,
        num_warps=num_warps,
        **launch,
    )  # fmt: skip
