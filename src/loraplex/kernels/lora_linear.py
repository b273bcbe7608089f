"""y = x W^T + scaling * v B^T: the expand is added onto the base GEMM's accumulator.

Where few tiles would leave multiprocessors idle, K is split over several programs per tile, and the
LoRA part is one more program of the tile, which meets the others where the parts are added up: it
waits for the shrink while they read the weight.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from loraplex.kernels.base import base_steps
from loraplex.kernels.meet import meet
from loraplex.kernels.tile import (
    expand_tile,
    finish_rows,
    load_groups_of_places,
    locate_slice,
)


@triton.jit
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
    K: tl.constexpr,
    SLICES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    V_SPLIT_K: tl.constexpr,
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
    LORA_STAGES: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y [M, N] = column_scale * (x W^T + scaling * v B^T) + bias + adapter_bias.

    x [M, K]; weight [N, K]; x_tiles and weight_tiles their tensor descriptors, if there are; v and
    groups from the shrink; planes [SPLIT_K + 1, tiles, BLOCK_M * BLOCK_N] float32 and arrivals
    [tiles], zero, if K is split.
    """
    # which tile: GROUP_M row blocks walk the columns together, so that both operands stay in L2
    row_blocks = tl.cdiv(num_tokens, BLOCK_M)
    column_blocks = tl.num_programs(0) // row_blocks
    first_row_block = tl.program_id(0) // (GROUP_M * column_blocks) * GROUP_M
    group_rows = tl.minimum(row_blocks - first_row_block, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * column_blocks)
    first_row = (first_row_block + within % group_rows) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    part, start, width, first = locate_slice(within // group_rows, SLICES, BLOCK_N)
    column = first + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)

    # rows and columns past the end repeat the last one, so that the loops need no masks
    safe_row = tl.minimum(row, num_tokens - 1).to(tl.int64)
    safe_column = tl.minimum(column, width - 1).to(tl.int64)

    # how many columns of v there are for this tile; read early, used after the base GEMM
    tile = first_row // TILE_M
    groups = load_groups_of_places(entries_ptr, stride_el, plan_ptr, tile, part, TILE_M, PLACES)
    num_groups = tl.sum(groups, axis=0)
    row_place = tl.load(places_ptr + safe_row)

    # base GEMM: every part walks the same number of blocks of K, the LoRA part none
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    first_step = split * STEPS
    last_step = first_step + STEPS
    if SPLIT_K > 1:
        last_step = tl.where(split < SPLIT_K, last_step, first_step)
    if IS_SWAPPED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    acc = base_steps(
        acc,
        x_tiles if HAS_DESCRIPTOR else x_ptr, stride_xm, stride_xk,
        weight_tiles if HAS_DESCRIPTOR else weight_ptr, stride_wn, stride_wk,
        safe_row, first_row, start + safe_column, start + first, first_step, last_step,
        y_ptr.to(tl.int64) != 0,
        K, BLOCK_K, SPLIT_K, IS_SWAPPED, HAS_DESCRIPTOR, PRECISION,
    )  # fmt: skip

    # the adapters of this tile, onto the same accumulator, once the shrink has finished
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if SPLIT_K == 1 or split == SPLIT_K:
        acc = expand_tile(
            acc,
            v_ptr, stride_vk, stride_vm, stride_vs,
            groups_ptr, stride_gt, stride_gs,
            stride_br,
            safe_row, row_place, safe_column, tile, part, num_groups,
            V_SPLIT_K, RANK_MULTIPLE, BLOCK_M, BLOCK_N, BLOCK_R, IS_SWAPPED, LORA_STAGES,
            y_ptr.dtype.element_ty, PRECISION,
        )  # fmt: skip

    if SPLIT_K > 1:
        # the last program of a tile to arrive adds the parts up, in a fixed order
        acc, is_last = meet(
            acc, planes_ptr, arrivals_ptr, tl.program_id(0), tl.num_programs(0), split, SPLIT_K + 1
        )
        if not is_last:
            return

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
    target = y_ptr + row.to(tl.int64)[:, None] * stride_ym
    target += (start + column).to(tl.int64)[None, :] * stride_yn
    mask = (row < num_tokens)[:, None] & (column < width)[None, :]
    tl.store(target, acc.to(y_ptr.dtype.element_ty), mask=mask)


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
    split_k: int,
    block_m: int,
    block_n: int,
    block_k: int,
    block_r: int,
    group_m: int,
    lora_stages: int,
    is_swapped: bool,
    has_descriptor: bool,
    num_warps: int,
    num_stages: int,
) -> None:
    """Write ``y`` [M, N]; ``v`` and ``groups`` are what :func:`launch_shrink` filled."""
    num_tokens, in_features = x.shape
    tiles = -(-num_tokens // block_m) * sum(-(-width // block_n) for width in slices)
    launch = {"launch_pdl": True} if is_dependent else {}
    x_tiles, weight_tiles = x, weight
    if has_descriptor:
        x_tiles = TensorDescriptor.from_tensor(x, [block_m, block_k])
        weight_tiles = TensorDescriptor.from_tensor(weight, [block_n, block_k])
    lora_linear_kernel[(tiles, split_k + 1 if split_k > 1 else 1)](
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
        K=in_features,
        SLICES=slices,
        SPLIT_K=split_k,
        V_SPLIT_K=v.shape[0],
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
        LORA_STAGES=lora_stages,
        IS_SWAPPED=is_swapped,
        HAS_DESCRIPTOR=has_descriptor,
        PDL=is_dependent,
        PRECISION=precision,
        num_warps=num_warps,
        num_stages=num_stages,
        **launch,
    )  # fmt: skip
