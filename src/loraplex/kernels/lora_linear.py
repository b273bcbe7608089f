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

from loraplex.kernels.tile import (
    add_product,
    expand_tile,
    finish_rows,
    load_groups_of_places,
    locate_slice,
)


@triton.jit
def base_product(
    x_ptr, stride_xm, stride_xk,
    weight_ptr, stride_wn, stride_wk,
    row,
    column,
    first_column,
    split,
    is_real,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x[row] weight[column]^T over one part of K, in float32; transposed if swapped.

    With a tensor descriptor in place of ``weight_ptr`` the copy engine fetches the weight's tiles.
    """
    # blocks of K are counted whole, so that every part begins at an aligned offset
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT_K - 1) // (BLOCK_K * SPLIT_K)
    first = split * (STEPS * BLOCK_K)
    k = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + row[:, None] * stride_xm + (first + k).to(tl.int64)[None, :] * stride_xk
    if not HAS_DESCRIPTOR:
        weight_tile = weight_ptr + column[:, None] * stride_wn
        weight_tile += (first + k).to(tl.int64)[None, :] * stride_wk
    # with few rows the weight's tile is the tall operand of the tensor cores
    if IS_SWAPPED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(STEPS):
        in_k = (first + step * BLOCK_K + k < K)[None, :]
        if K % (BLOCK_K * SPLIT_K) == 0:
            x = tl.load(x_tile)
        else:
            x = tl.load(x_tile, mask=in_k, other=0.0)
        if HAS_DESCRIPTOR:
            weight = weight_ptr.load([first_column, first + step * BLOCK_K])
        elif K % (BLOCK_K * SPLIT_K) == 0:
            weight = tl.load(weight_tile)
        else:
            weight = tl.load(weight_tile, mask=in_k, other=0.0)
        if IS_SWAPPED:
            acc = add_product(acc, weight, x.T, is_real, PRECISION)
        else:
            acc = add_product(acc, x, weight.T, is_real, PRECISION)
        x_tile += BLOCK_K * stride_xk
        if not HAS_DESCRIPTOR:
            weight_tile += BLOCK_K * stride_wk
    return acc


@triton.jit
def lora_linear_kernel(
    x_ptr, stride_xm, stride_xk,
    weight_ptr, stride_wn, stride_wk,
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

    x [M, K]; weight [N, K]; v and groups from the shrink; planes [SPLIT_K + 1, tiles,
    BLOCK_M * BLOCK_N] float32 and arrivals [tiles], zero, if K is split.
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

    # base GEMM
    if SPLIT_K == 1 or split < SPLIT_K:
        acc = base_product(
            x_ptr, stride_xm, stride_xk,
            weight_ptr, stride_wn, stride_wk,
            safe_row,
            start + safe_column,
            start + first,
            split,
            y_ptr.to(tl.int64) != 0,
            K, SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_K, IS_SWAPPED, HAS_DESCRIPTOR, PRECISION,
        )  # fmt: skip
    elif IS_SWAPPED:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

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
        tile_size = BLOCK_M * BLOCK_N
        if IS_SWAPPED:
            inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        else:
            inner = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        stride_plane = tl.num_programs(0).to(tl.int64) * tile_size
        plane = planes_ptr + tl.program_id(0).to(tl.int64) * tile_size + inner
        tl.store(plane + split * stride_plane, acc)
        # every warp has stored before one thread tells
        tl.debug_barrier()
        arrival_ptr = arrivals_ptr + tl.program_id(0)
        if tl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu") < SPLIT_K:
            return
        acc = tl.load(plane)
        for _ in tl.static_range(SPLIT_K):
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
    source = weight
    if has_descriptor:
        source = TensorDescriptor.from_tensor(weight, [block_n, block_k])
    lora_linear_kernel[(tiles, split_k + 1 if split_k > 1 else 1)](
        x, x.stride(0), x.stride(1),
        source, weight.stride(0), weight.stride(1),
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
