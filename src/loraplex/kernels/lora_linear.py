"""y = x W^T + scaling * v B^T: the expand is added onto the base GEMM's accumulator.

Where few tiles would leave multiprocessors idle, K is split over several programs per tile, and the
LoRA part is one more program of the tile, which meets the others where the parts are added up: it
waits for the shrink while they read the weight.

The loads of v and B stand at the end of a chain, and a tile alone on its multiprocessor has nothing
to hide them behind but its own walk along K. So the first block of B is asked for before the walk,
and v too by programs that start so late that the shrink has surely ended.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from loraplex.kernels.base import base_steps
from loraplex.kernels.launch import launch
from loraplex.kernels.meet import add_halves, leave_half, meet
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


@triton.jit(do_not_specialize=["stride_vk", "num_tokens", "num_whole"])
def lora_linear_kernel(
    x_ptr, stride_xm, stride_xk,
    x_tiles,
    weight_ptr, stride_wn, stride_wk,
    weight_tiles,
    bias_ptr,
    y_ptr, stride_ym, stride_yn,
    entries_ptr, stride_el,
    stride_br,
    v_ptr, stride_vk, stride_vm, stride_vs,
    groups_ptr, stride_gt, stride_gs,
    indices_ptr,
    places_ptr,
    plan_ptr,
    planes_ptr,
    arrivals_ptr,
    num_tokens,
    num_early,
    num_whole,
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
    PLACES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
    HALVES_TAIL: tl.constexpr,
    LORA_STAGES: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    HAS_EARLY_B: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y [M, N] = column_scale * (x W^T + scaling * v B^T) + bias + adapter_bias.

    x [M, K]; weight [N, K]; x_tiles and weight_tiles their tensor descriptors, if there are; v and
    groups from the shrink; planes [SPLIT_K + 1, tiles, BLOCK_M * BLOCK_N] float32 and arrivals
    [tiles], zero, if K is split. The first ``num_early`` programs may run beside the shrink.
    HALVES_TAIL: the tiles from ``num_whole`` on have two programs, half of K each, which meet on
    planes [tiles - num_whole, 2, BLOCK_M * BLOCK_N].
    """
    # which tile; those of the last wave may be halves, two programs each
    number = tl.program_id(0)
    tiles = tl.num_programs(0)
    split = tl.program_id(1)
    if HALVES_TAIL:
        tiles = num_whole + (tiles - num_whole) // 2
        is_whole = number < num_whole
        split = tl.where(is_whole, 0, (number - num_whole) % 2)
        number = tl.where(is_whole, number, num_whole + (number - num_whole) // 2)
    # GROUP_M row blocks walk the columns together, so that both operands stay in L2
    row_blocks = tl.cdiv(num_tokens, BLOCK_M)
    column_blocks = tiles // row_blocks
    first_row_block = number // (GROUP_M * column_blocks) * GROUP_M
    group_rows = tl.minimum(row_blocks - first_row_block, GROUP_M)
    within = number % (GROUP_M * column_blocks)
    first_row = (first_row_block + within % group_rows) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    part, start, width, first = locate_slice(within // group_rows, SLICES, BLOCK_N)
    column = first + tl.arange(0, BLOCK_N)

    # rows and columns past the end repeat the last one, so that the loops need no masks
    safe_row = tl.minimum(row, num_tokens - 1).to(tl.int64)
    safe_column = tl.minimum(column, width - 1).to(tl.int64)

    # where the tile's first adapters have their B, and how many columns of v there are
    tile = first_row // TILE_M
    if SPLIT_K > 1:
        has_lora = split == SPLIT_K
    else:
        has_lora = split == 0
    address, stride_bn, place, ranks, num_groups = find_first_groups(
        entries_ptr, stride_el, stride_br, plan_ptr, tile, part, has_lora,
        TILE_M, PLACES, BLOCK_R // 8, y_ptr.dtype.element_ty.primitive_bitwidth // 8,
    )  # fmt: skip
    row_place = tl.load(places_ptr + safe_row)

    # B of those, and v as well, if this is not among the programs that run beside the shrink
    is_real = y_ptr.to(tl.int64) != 0
    if HAS_EARLY_B:
        b = load_b(
            address, stride_bn, ranks, stride_br, safe_column,
            RANK_MULTIPLE, False, BLOCK_N, BLOCK_R, y_ptr.dtype.element_ty,
        )  # fmt: skip
        is_late = tl.program_id(0) >= num_early
        if PDL:
            if is_late:
                gdc_wait()
        v = load_v(
            v_ptr, stride_vk, stride_vm, stride_vs, safe_row, row_place, part,
            tl.where(is_late, place, -2), ranks,
            V_SPLIT_K, V_GROUPS, RANK_MULTIPLE, BLOCK_M, BLOCK_R, y_ptr.dtype.element_ty,
        )  # fmt: skip

    # base GEMM: every part walks the same number of blocks of K, the LoRA part none
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    first_step = split * STEPS
    last_step = first_step + STEPS
    if SPLIT_K > 1:
        last_step = tl.where(split < SPLIT_K, last_step, first_step)
    if HALVES_TAIL:
        HALF: tl.constexpr = (STEPS + 1) // 2
        first_step = split * HALF
        last_step = tl.where(is_whole | (split == 1), STEPS, HALF)
    if IS_SWAPPED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    acc = base_steps(
        acc,
        x_tiles if HAS_DESCRIPTOR else x_ptr, stride_xm, stride_xk,
        weight_tiles if HAS_DESCRIPTOR else weight_ptr, stride_wn, stride_wk,
        safe_row, first_row, start + safe_column, start + first, first_step, last_step,
        is_real,
        K, BLOCK_K, SPLIT_K, IS_SWAPPED, HAS_DESCRIPTOR, PRECISION,
    )  # fmt: skip

    # the adapters of this tile, onto the same accumulator, once the shrink has finished
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if has_lora & (num_groups > 0):
        if HAS_EARLY_B:
            if not is_late:
                v = load_v(
                    v_ptr, stride_vk, stride_vm, stride_vs, safe_row, row_place, part, place, ranks,
                    V_SPLIT_K, V_GROUPS, RANK_MULTIPLE, BLOCK_M, BLOCK_R, y_ptr.dtype.element_ty,
                )  # fmt: skip
            acc = add_expand(
                acc, held(v, is_real), held(b, is_real), is_real, IS_SWAPPED, PRECISION
            )
        acc = expand_tile(
            acc,
            v_ptr, stride_vk, stride_vm, stride_vs,
            groups_ptr, stride_gt, stride_gs,
            stride_br,
            safe_row, row_place, safe_column, tile, part, num_groups, 1 if HAS_EARLY_B else 0,
            V_SPLIT_K, V_GROUPS, RANK_MULTIPLE, BLOCK_M, BLOCK_N, BLOCK_R, IS_SWAPPED, LORA_STAGES,
            y_ptr.dtype.element_ty, PRECISION,
        )  # fmt: skip

    if SPLIT_K > 1:
        # the last program of a tile to arrive adds the parts up, in a fixed order
        acc, is_last = meet(acc, planes_ptr, arrivals_ptr, number, tiles, split, SPLIT_K + 1)
        if not is_last:
            return

    if IS_SWAPPED:
        result = acc.T
    else:
        result = acc
    if HALVES_TAIL:
        if is_whole:
            store_tile(
                result,
                y_ptr, stride_ym, stride_yn,
                entries_ptr, stride_el,
                indices_ptr,
                bias_ptr,
                num_tokens, row, column, part, start, width,
                HAS_BIAS, HAS_COLUMN_SCALE, HAS_ADAPTER_BIAS,
            )  # fmt: skip
        else:
            # the second half of a tile to arrive finishes it, a few columns at a time
            met = number - num_whole
            pair = planes_ptr + met.to(tl.int64) * (2 * BLOCK_M * BLOCK_N)
            if leave_half(acc, pair, arrivals_ptr + met, split):
                WIDTH: tl.constexpr = BLOCK_N if BLOCK_N < 64 else BLOCK_N // 4
                for first_column in range(0, BLOCK_N, WIDTH):
                    some = add_halves(pair, first_column, BLOCK_M, BLOCK_N, WIDTH, IS_SWAPPED)
                    some_column = first + first_column + tl.arange(0, WIDTH)
                    store_tile(
                        some,
                        y_ptr, stride_ym, stride_yn,
                        entries_ptr, stride_el,
                        indices_ptr,
                        bias_ptr,
                        num_tokens, row, some_column, part, start, width,
                        HAS_BIAS, HAS_COLUMN_SCALE, HAS_ADAPTER_BIAS,
                    )  # fmt: skip
    else:
        store_tile(
            result,
            y_ptr, stride_ym, stride_yn,
            entries_ptr, stride_el,
            indices_ptr,
            bias_ptr,
            num_tokens, row, column, part, start, width,
            HAS_BIAS, HAS_COLUMN_SCALE, HAS_ADAPTER_BIAS,
        )  # fmt: skip


def launch_lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    entries: Tensor,
    stride_br: int,
    v: Tensor,
    groups: Tensor,
    indices: Tensor,
    places: Tensor,
    plan: Tensor,
    planes: Tensor,
    arrivals: Tensor,
    *,
    slices: tuple[int, ...],
    rank_multiple: int,
    has_column_scale: bool,
    has_adapter_bias: bool,
    tile_m: int,
    num_places: int,
    precision: str,
    is_dependent: bool,
    num_early: int,
    num_whole: int | None,
    split_k: int,
    block_m: int,
    block_n: int,
    block_k: int,
    block_r: int,
    group_m: int,
    lora_stages: int,
    is_swapped: bool,
    has_early_b: bool,
    has_descriptor: bool,
    num_warps: int,
    num_stages: int,
) -> None:
    """Write ``y`` [M, N]; ``v`` and ``groups`` are what :func:`launch_shrink` filled.

    ``num_early`` is a guess at how many programs the GPU holds at a time; any number is right.
    Tiles from ``num_whole`` on are computed in halves, none if it is None.
    """
    num_tokens, in_features = x.shape
    tiles = -(-num_tokens // block_m) * sum(-(-width // block_n) for width in slices)
    x_tiles, weight_tiles = x, weight
    if has_descriptor:
        x_tiles = TensorDescriptor.from_tensor(x, [block_m, block_k])
        weight_tiles = TensorDescriptor.from_tensor(weight, [block_n, block_k])
    programs = tiles if num_whole is None else 2 * tiles - num_whole
    launch(
        lora_linear_kernel, (programs, split_k + 1 if split_k > 1 else 1),
        x, x.stride(0), x.stride(1),
        x_tiles,
        weight, weight.stride(0), weight.stride(1),
        weight_tiles,
        bias if bias is not None else y,
        y, y.stride(0), y.stride(1),
        entries, entries.stride(0),
        stride_br,
        v, v.stride(0), v.stride(1), v.stride(2),
        groups, groups.stride(0), groups.stride(1),
        indices,
        places,
        plan,
        planes,
        arrivals,
        num_tokens,
        num_early,
        num_whole or 0,
        K=in_features,
        SLICES=slices,
        SPLIT_K=split_k,
        V_SPLIT_K=v.shape[0],
        V_GROUPS=v.shape[3] // 8,
        RANK_MULTIPLE=rank_multiple,
        HAS_BIAS=bias is not None,
        HAS_COLUMN_SCALE=has_column_scale,
        HAS_ADAPTER_BIAS=has_adapter_bias,
        TILE_M=tile_m,
        PLACES=num_places,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_R=block_r,
        GROUP_M=group_m,
        HALVES_TAIL=num_whole is not None,
        LORA_STAGES=lora_stages,
        IS_SWAPPED=is_swapped,
        HAS_EARLY_B=has_early_b,
        HAS_DESCRIPTOR=has_descriptor,
        PDL=is_dependent,
        PRECISION=precision,
        num_warps=num_warps,
        num_stages=num_stages,
        **({"launch_pdl": True} if is_dependent else {}),
    )  # fmt: skip
