"""Shrink, base GEMM and expand in one launch, for batches so small that a launch shows.

Some programs do the shrink, the others the parts of the base GEMM's tiles. The adapters of a tile
are added by a part of their own, which does little else than wait; or by the first of the base
parts, in the middle of its walk along K: by then the shrink is usually done, and while one program
of a multiprocessor is busy with its adapters, its neighbours go on reading the weight. B may be
asked for before the walk. The part with the adapters also gathers the others' sums, in a fixed
order.

Progress: a program waits only for programs with lower numbers, which were started before it. Of
these the shrink's wait for nobody, nor do parts without the adapters. Counters are zero between
launches: whoever is known to be the last to look at one sets it back.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from loraplex.kernels.base import base_steps, prefetch_weight
from loraplex.kernels.launch import launch
from loraplex.kernels.meet import gather_parts, leave_part, tell, wait_for_all
from loraplex.kernels.shrink import shrink_program
from loraplex.kernels.tile import (
    add_expand,
    expand_tile,
    find_first_groups,
    held,
    load_b,
    load_v,
    locate_slice,
    store_tile,
)


@triton.jit
def first_step_of(split, OWN: tl.constexpr, OTHERS: tl.constexpr):
    """First block of K of one part of a tile; the first part has OWN of them, each other OTHERS."""
    return tl.where(split == 0, 0, OWN + (split - 1) * OTHERS)


@triton.jit
def role_of(pid, tiles, num_shrink, SPLIT_K: tl.constexpr, HAS_LORA_PART: tl.constexpr):
    """What a program does: its number in the shrink, whether it is of it; its tile and its part.

    Programs wait only for those with lower numbers. Parts that wait for nobody go first, since
    early programs get multiprocessors of their own.
    """
    if HAS_LORA_PART:
        num_base = tiles * SPLIT_K
        shrink_pid = pid - num_base
        is_shrink = (shrink_pid >= 0) & (shrink_pid < num_shrink)
        is_base = shrink_pid < 0
        number = tl.where(is_base, pid // SPLIT_K, shrink_pid - num_shrink)
        split = tl.where(is_base, pid % SPLIT_K, SPLIT_K)
    else:
        shrink_pid = pid
        is_shrink = pid < num_shrink
        number = (pid - num_shrink) // SPLIT_K
        split = SPLIT_K - 1 - (pid - num_shrink) % SPLIT_K
    return shrink_pid, is_shrink, number, split


@triton.jit(do_not_specialize=["stride_vk", "num_tokens", "num_items", "num_shrink"])
def single_launch_kernel(
    x_ptr, stride_xm, stride_xk,
    x_tiles,
    weight_ptr, stride_wn, stride_wk,
    weight_tiles,
    bias_ptr,
    y_ptr, stride_ym, stride_yn,
    entries_ptr, stride_el,
    stride_ak,
    stride_br,
    v_ptr, stride_vk, stride_vm, stride_vs,
    groups_ptr, stride_gt, stride_gs,
    indices_ptr,
    places_ptr,
    plan_ptr,
    planes_ptr,
    counters_ptr,
    num_tokens,
    num_items,
    num_shrink,
    K: tl.constexpr,
    SLICES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    V_SPLIT_K: tl.constexpr,
    V_GROUPS: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_COLUMN_SCALE: tl.constexpr,
    HAS_ADAPTER_BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    ITEM_M: tl.constexpr,
    PLACES: tl.constexpr,
    RANK_BLOCKS: tl.constexpr,
    SHRINK_R: tl.constexpr,
    SHRINK_K: tl.constexpr,
    LANES: tl.constexpr,
    SHRINK_STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LORA_STAGES: tl.constexpr,
    EXPAND_AT: tl.constexpr,
    LORA_STEPS: tl.constexpr,
    HAS_LORA_PART: tl.constexpr,
    HAS_EARLY_B: tl.constexpr,
    PREFETCH: tl.constexpr,
    IS_EARLY: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y [M, N] = column_scale * (x W^T + scaling * (x A^T) B^T) + bias + adapter_bias.

    x [M, K]; weight [N, K]; x_tiles and weight_tiles their tensor descriptors, if there are; v
    [V_SPLIT_K, M, S, R], groups [T, S, G, 4] and planes [PARTS - 1, tiles, BLOCK_M * BLOCK_N] are
    room to work in; counters [2 + tiles] are zero before and after.

    The adapters are one more part of each tile (HAS_LORA_PART); or the first part walks LORA_STEPS
    blocks of K less than the others and adds them when EXPAND_AT eighths of its walk are done.
    """
    # blocks of K, those of the parts without the adapters, and of the one with
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    WANTED: tl.constexpr = (STEPS + LORA_STEPS + SPLIT_K - 1) // SPLIT_K
    MOST: tl.constexpr = STEPS // (SPLIT_K - 1) if SPLIT_K > 1 else 0
    OTHERS: tl.constexpr = WANTED if WANTED < MOST else MOST
    OWN: tl.constexpr = STEPS - (SPLIT_K - 1) * OTHERS

    PARTS: tl.constexpr = SPLIT_K + HAS_LORA_PART
    pid = tl.program_id(0)
    tiles = (tl.num_programs(0) - num_shrink) // PARTS
    shrink_pid, is_shrink, number, split = role_of(pid, tiles, num_shrink, SPLIT_K, HAS_LORA_PART)
    is_base = (not is_shrink) & (split < SPLIT_K)
    has_lora = split == (SPLIT_K if HAS_LORA_PART else 0)
    column_blocks = 0
    for i in tl.static_range(len(SLICES)):
        column_blocks += tl.cdiv(SLICES[i], BLOCK_N)
    part, start, width, first = locate_slice(number % column_blocks, SLICES, BLOCK_N)
    column = first + tl.arange(0, BLOCK_N)
    first_step = first_step_of(split, OWN, OTHERS)

    if PDL:
        if PREFETCH > 0:
            # the weight is nobody's output: its first blocks may come before the wait
            if is_base:
                prefetch_weight(
                    weight_ptr, stride_wn,
                    start + tl.minimum(column, width - 1), first_step * BLOCK_K,
                    PREFETCH, BLOCK_N,
                )  # fmt: skip
        gdc_wait()
        if IS_EARLY:
            gdc_launch_dependents()

    if is_shrink:
        tile_items = tl.cdiv(num_tokens, TILE_M) * (num_items + 1)
        slice_blocks: tl.constexpr = len(SLICES) * RANK_BLOCKS
        shrink_program(
            x_ptr, stride_xm, stride_xk,
            entries_ptr, stride_el,
            stride_ak,
            stride_br,
            plan_ptr,
            v_ptr, stride_vk, stride_vm, stride_vs,
            groups_ptr, stride_gt, stride_gs,
            shrink_pid % tile_items, shrink_pid // tile_items % slice_blocks,
            shrink_pid // (tile_items * slice_blocks), num_items,
            K, V_SPLIT_K, RANK_MULTIPLE, RANK_BLOCKS, TILE_M, ITEM_M, PLACES, SHRINK_R, SHRINK_K,
            LANES, BLOCK_R // 8, SHRINK_STAGES, PRECISION,
        )  # fmt: skip
        tell(counters_ptr)
        return

    first_row = number // column_blocks * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    # rows and columns past the end repeat the last one, so that the loops need no masks
    safe_row = tl.minimum(row, num_tokens - 1).to(tl.int64)
    safe_column = tl.minimum(column, width - 1).to(tl.int64)
    # which blocks of K, and how many of them before the adapters
    last_step = OWN + split * OTHERS
    if HAS_LORA_PART:
        last_step = tl.where(has_lora, first_step, last_step)
        middle = last_step
    else:
        middle = tl.where(has_lora, OWN * EXPAND_AT // 8, last_step)

    # Where the first adapters of the tile have their B, and how many columns of v there are: the
    # loads are a chain, each of which waits long while the weight is read, so they come early. So
    # does B itself where there are registers to hold it until the walk is done.
    tile = first_row // TILE_M
    address, stride_bn, place, ranks, num_groups = find_first_groups(
        entries_ptr, stride_el, stride_br, plan_ptr, tile, part, has_lora,
        TILE_M, PLACES, BLOCK_R // 8, y_ptr.dtype.element_ty.primitive_bitwidth // 8,
    )  # fmt: skip
    if HAS_EARLY_B:
        b = load_b(
            address, stride_bn, ranks, stride_br, safe_column,
            RANK_MULTIPLE, False, BLOCK_N, BLOCK_R, y_ptr.dtype.element_ty,
        )  # fmt: skip
    row_place = tl.load(places_ptr + safe_row)
    is_real = y_ptr.to(tl.int64) != 0

    if IS_SWAPPED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    acc = base_steps(
        acc,
        x_tiles if HAS_DESCRIPTOR else x_ptr, stride_xm, stride_xk,
        weight_tiles if HAS_DESCRIPTOR else weight_ptr, stride_wn, stride_wk,
        safe_row, first_row, start + safe_column, start + first, first_step, middle,
        is_real, K, BLOCK_K, 1, IS_SWAPPED, HAS_DESCRIPTOR, PRECISION,
    )  # fmt: skip

    if PDL and not IS_EARLY:
        gdc_launch_dependents()

    # the adapters of this tile, onto the same accumulator, once the shrink is done
    if has_lora:
        wait_for_all(counters_ptr, num_shrink, tiles)
        if HAS_EARLY_B:
            if num_groups > 0:
                v = load_v(
                    v_ptr, stride_vk, stride_vm, stride_vs, safe_row, row_place, part, place, ranks,
                    V_SPLIT_K, V_GROUPS, RANK_MULTIPLE, BLOCK_M, BLOCK_R, y_ptr.dtype.element_ty,
                )  # fmt: skip
                acc = add_expand(acc, v, held(b, is_real), is_real, IS_SWAPPED, PRECISION)
        acc = expand_tile(
            acc,
            v_ptr, stride_vk, stride_vm, stride_vs,
            groups_ptr, stride_gt, stride_gs,
            stride_br,
            safe_row, row_place, safe_column, tile, part, num_groups, 1 if HAS_EARLY_B else 0,
            V_SPLIT_K, V_GROUPS, RANK_MULTIPLE, BLOCK_M, BLOCK_N, BLOCK_R, IS_SWAPPED, LORA_STAGES,
            y_ptr.dtype.element_ty, PRECISION,
        )  # fmt: skip
    if (EXPAND_AT < 8) and (not HAS_LORA_PART):
        acc = base_steps(
            acc,
            x_tiles if HAS_DESCRIPTOR else x_ptr, stride_xm, stride_xk,
            weight_tiles if HAS_DESCRIPTOR else weight_ptr, stride_wn, stride_wk,
            safe_row, first_row, start + safe_column, start + first, middle, last_step,
            is_real, K, BLOCK_K, 1, IS_SWAPPED, HAS_DESCRIPTOR, PRECISION,
        )  # fmt: skip

    if PARTS > 1:
        # the part with the adapters gathers the others
        arrivals_ptr = counters_ptr + 2 + number
        stride_plane = tiles.to(tl.int64) * (BLOCK_M * BLOCK_N)
        plane = planes_ptr + number.to(tl.int64) * (BLOCK_M * BLOCK_N)
        if not has_lora:
            own = split if HAS_LORA_PART else split - 1
            leave_part(acc, plane + own * stride_plane, arrivals_ptr)
            return
        acc = gather_parts(acc, plane, stride_plane, arrivals_ptr, PARTS - 1)

    if IS_SWAPPED:
        acc = acc.T
    store_tile(
        acc,
        y_ptr, stride_ym, stride_yn,
        entries_ptr, stride_el,
        indices_ptr,
        bias_ptr,
        num_tokens, row, column, part, start, width,
        HAS_BIAS, HAS_COLUMN_SCALE, HAS_ADAPTER_BIAS,
    )  # fmt: skip


def launch_single(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    entries: Tensor,
    stride_ak: int,
    stride_br: int,
    v: Tensor,
    groups: Tensor,
    indices: Tensor,
    places: Tensor,
    plan: Tensor,
    planes: Tensor,
    counters: Tensor,
    *,
    slices: tuple[int, ...],
    rank_multiple: int,
    has_column_scale: bool,
    has_adapter_bias: bool,
    tile_m: int,
    item_m: int,
    num_items: int,
    num_places: int,
    max_rank: int,
    precision: str,
    is_dependent: bool,
    shrink_r: int,
    shrink_k: int,
    lanes: int,
    shrink_stages: int,
    split_k: int,
    block_m: int,
    block_n: int,
    block_k: int,
    block_r: int,
    lora_stages: int,
    expand_at: int,
    lora_steps: int,
    has_lora_part: bool,
    has_early_b: bool,
    prefetch: int,
    is_early: bool,
    is_swapped: bool,
    has_descriptor: bool,
    num_warps: int,
    num_stages: int,
) -> None:
    """Write ``y`` [M, N]; ``counters`` [2 + tiles] are zero before and after."""
    num_tokens, in_features = x.shape
    rank_blocks = -(-max_rank // shrink_r)
    v_split_k, _, num_slices, _ = v.shape
    tiles = -(-num_tokens // block_m) * sum(-(-width // block_n) for width in slices)
    blocks = num_slices * rank_blocks * v_split_k
    num_shrink = -(-num_tokens // tile_m) * (num_items + 1) * blocks
    x_tiles, weight_tiles = x, weight
    if has_descriptor:
        x_tiles = TensorDescriptor.from_tensor(x, [block_m, block_k])
        weight_tiles = TensorDescriptor.from_tensor(weight, [block_n, block_k])
    launch(
        single_launch_kernel, (num_shrink + tiles * (split_k + has_lora_part),),
        x, x.stride(0), x.stride(1),
        x_tiles,
        weight, weight.stride(0), weight.stride(1),
        weight_tiles,
        bias if bias is not None else y,
        y, y.stride(0), y.stride(1),
        entries, entries.stride(0),
        stride_ak,
        stride_br,
        v, v.stride(0), v.stride(1), v.stride(2),
        groups, groups.stride(0), groups.stride(1),
        indices,
        places,
        plan,
        planes,
        counters,
        num_tokens,
        num_items,
        num_shrink,
        K=in_features,
        SLICES=slices,
        SPLIT_K=split_k,
        V_SPLIT_K=v_split_k,
        V_GROUPS=v.shape[3] // 8,
        RANK_MULTIPLE=rank_multiple,
        HAS_BIAS=bias is not None,
        HAS_COLUMN_SCALE=has_column_scale,
        HAS_ADAPTER_BIAS=has_adapter_bias,
        TILE_M=tile_m,
        ITEM_M=item_m,
        PLACES=num_places,
        RANK_BLOCKS=rank_blocks,
        SHRINK_R=shrink_r,
        SHRINK_K=shrink_k,
        LANES=lanes,
        SHRINK_STAGES=shrink_stages,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_R=block_r,
        LORA_STAGES=lora_stages,
        EXPAND_AT=expand_at,
        LORA_STEPS=lora_steps,
        HAS_LORA_PART=has_lora_part,
        HAS_EARLY_B=has_early_b,
        PREFETCH=prefetch if is_dependent else 0,
        IS_EARLY=is_early,
        IS_SWAPPED=is_swapped,
        HAS_DESCRIPTOR=has_descriptor,
        PDL=is_dependent,
        PRECISION=precision,
        num_warps=num_warps,
        num_stages=num_stages,
        **({"launch_pdl": True} if is_dependent else {}),
    )  # fmt: skip
