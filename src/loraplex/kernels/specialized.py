"""Shrink, base GEMM and expand in one launch, with warps of their own for the adapters (Hopper).

One group of warps does nothing but multiply what the copy engine brings of W and x. The other one
computes shares of the shrink, copies the tile's columns of B, and hands them over with v once all
shares are there. So the weight goes on flowing while somebody waits for the adapters. What does not
depend on the predecessor is read before it ends, where the caller can promise that.

Written in Gluon, since Triton's loops fetch nothing while a program is busy outside of them.

Progress: parts of a tile wait for parts with lower numbers, which were started before them. The
shares of the shrink are waited for in any order, but not for ever: after some polls a program
computes them itself. Counters are zero between launches.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from loraplex.kernels.launch import launch
from loraplex.kernels.specialized_adapters import adapter_role
from loraplex.kernels.specialized_stream import stream_role

ADAPTER_WARPS = 4
# after so many looks, some milliseconds, a program stops waiting for the others' shares
MOST_POLLS = 5000
ELEMENT = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
# registers of an adapter warp's thread by (warps that multiply, programs a multiprocessor)
ADAPTER_REGISTERS = {(4, 1): 240, (8, 1): 184, (4, 2): 152}


# what follows from the number of tokens would have the kernel compiled again and again
@gluon.jit(do_not_specialize=["stride_vk", "num_tokens", "num_items", "num_workers"])
def specialized_launch_kernel(
    x_ptr, stride_xm,
    x_tiles,
    w_tiles,
    bias_ptr,
    y_ptr, stride_ym,
    entries_ptr, stride_el,
    stride_vk, stride_vm, stride_vs,
    indices_ptr,
    places_ptr,
    plan_ptr,
    planes_ptr,
    counters_ptr,
    num_tokens,
    num_items,
    num_workers,
    K: gl.constexpr,
    SLICES: gl.constexpr,
    SPLIT_K: gl.constexpr,
    LORA_STEPS: gl.constexpr,
    V_SPLIT_K: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_COLUMN_SCALE: gl.constexpr,
    HAS_ADAPTER_BIAS: gl.constexpr,
    TILE_M: gl.constexpr,
    ITEM_M: gl.constexpr,
    PLACES: gl.constexpr,
    RANK_BLOCKS: gl.constexpr,
    SHRINK_R: gl.constexpr,
    SHRINK_K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_R: gl.constexpr,
    RANKS: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    IS_SETTLED: gl.constexpr,
    PDL: gl.constexpr,
    MOST_POLLS: gl.constexpr,
    EXCHANGE: gl.constexpr,
    ADAPTER_WARPS: gl.constexpr,
    ADAPTER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """y [M, N] = column_scale * (x W^T + scaling * (x A^T) B^T) + bias + adapter_bias.

    x [M, K], x_tiles and w_tiles descriptors of x and of W [N, K]; planes [SPLIT_K - 1, tiles,
    BLOCK_N * BLOCK_M] float32 are room to work in; counters [2 + tiles] are zero before and after,
    and EXCHANGE behind them is where programs leave v. Programs below ``num_workers`` share the
    shrink.
    """
    DTYPE: gl.constexpr = w_tiles.dtype
    x_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_M, BLOCK_K], x_tiles.layout)
    w_buffers = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, BLOCK_K], w_tiles.layout)
    B: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_R], DTYPE)
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_R], DTYPE)
    b_tiles = gl.allocate_shared_memory(DTYPE, [BUFFERS, BLOCK_N, BLOCK_R], B)
    v_tiles = gl.allocate_shared_memory(DTYPE, [BUFFERS, BLOCK_M, BLOCK_R], V)
    blocks = gl.allocate_shared_memory(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    filled = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    used = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    counted = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(filled.index(buffer), count=1)
        mbarrier.init(used.index(buffer), count=1)
    mbarrier.init(counted, count=1)
    fence_async_shared()

    # which tile and which part; parts without the adapters have the lower numbers
    tiles = gl.num_programs(0) // SPLIT_K
    pid = gl.program_id(0)
    number = pid % tiles
    split = SPLIT_K - 1 - pid // tiles
    # tiles of the same columns beside each other, for they read the same rows of W
    row_blocks = (num_tokens + BLOCK_M - 1) // BLOCK_M
    first_row = number % row_blocks * BLOCK_M
    block = number // row_blocks
    part = 0
    start = 0
    first = block * BLOCK_N
    width = SLICES[0]
    slice_block = 0
    slice_start = 0
    for i in gl.static_range(len(SLICES)):
        is_here = block >= slice_block
        part = gl.where(is_here, i, part)
        start = gl.where(is_here, slice_start, start)
        first = gl.where(is_here, (block - slice_block) * BLOCK_N, first)
        width = gl.where(is_here, SLICES[i], width)
        slice_block += (SLICES[i] + BLOCK_N - 1) // BLOCK_N
        slice_start += SLICES[i]

    # its blocks of K; the first part has LORA_STEPS less than the others, or more if negative
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    WANTED: gl.constexpr = (STEPS + LORA_STEPS + SPLIT_K - 1) // SPLIT_K
    MOST: gl.constexpr = STEPS // (SPLIT_K - 1) if SPLIT_K > 1 else 0
    FEWER: gl.constexpr = WANTED if WANTED < MOST else MOST
    OTHERS: gl.constexpr = FEWER if FEWER > 0 else 0
    OWN: gl.constexpr = STEPS - (SPLIT_K - 1) * OTHERS
    first_step = gl.where(split == 0, 0, OWN + (split - 1) * OTHERS)
    count = gl.where(split == 0, OWN, OTHERS)
    gl.warp_specialize(
        [
            (
                stream_role,
                (
                    x_tiles, w_tiles, bias_ptr,
                    y_ptr, stride_ym,
                    entries_ptr, stride_el,
                    indices_ptr,
                    planes_ptr,
                    counters_ptr,
                    x_buffers, w_buffers, arrived, b_tiles, v_tiles, blocks, counted, filled, used,
                    split, number, tiles, first_row, part, start, first, width, first_step, count,
                    num_tokens,
                    SPLIT_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, BUFFERS,
                    HAS_BIAS, HAS_COLUMN_SCALE, HAS_ADAPTER_BIAS, IS_SETTLED, PDL, num_warps,
                ),
            ),
            (
                adapter_role,
                (
                    x_ptr, stride_xm,
                    entries_ptr, stride_el,
                    stride_vk, stride_vm, stride_vs,
                    indices_ptr,
                    places_ptr,
                    plan_ptr,
                    counters_ptr,
                    b_tiles, v_tiles, blocks, counted, filled, used,
                    pid, first_row, part, first, width, split == 0, num_tokens, num_items,
                    num_workers,
                    K, len(SLICES), V_SPLIT_K, TILE_M, ITEM_M, PLACES, RANK_BLOCKS, SHRINK_R,
                    SHRINK_K, BLOCK_M, BLOCK_N, BLOCK_R, RANKS, BUFFERS, IS_SETTLED, PDL,
                    MOST_POLLS, EXCHANGE, ADAPTER_WARPS,
                ),
            ),
        ],
        [ADAPTER_WARPS],
        [ADAPTER_REGISTERS],
    )  # fmt: skip


def launch_specialized(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    entries: Tensor,
    indices: Tensor,
    places: Tensor,
    plan: Tensor,
    planes: Tensor,
    counters: Tensor,
    *,
    slices: tuple[int, ...],
    has_column_scale: bool,
    has_adapter_bias: bool,
    tile_m: int,
    item_m: int,
    num_items: int,
    num_places: int,
    num_multiprocessors: int,
    is_settled: bool,
    is_dependent: bool,
    exchange: int,
    most_ranks: int,
    columns: int,
    v_split_k: int,
    shrink_r: int,
    shrink_k: int,
    split_k: int,
    lora_steps: int,
    block_m: int,
    block_n: int,
    block_k: int,
    block_r: int,
    lora_stages: int,
    occupancy: int,
    num_warps: int,
    num_stages: int,
) -> None:
    """Write ``y`` [M, N]; ``counters`` are zero before and after, but for the words ``exchange``
    behind them.

    Rows of all tensors are dense and start on 16 bytes, ranks are multiples of 8.
    """
    num_tokens, in_features = x.shape
    num_slices = len(slices)
    rank_blocks = -(-most_ranks // shrink_r)
    tiles = -(-num_tokens // block_m) * sum(-(-width // block_n) for width in slices)
    most_shares = -(-num_tokens // tile_m) * num_items * (item_m // 16)
    most_shares *= num_slices * rank_blocks * v_split_k
    num_workers = min(tiles * split_k, most_shares, num_multiprocessors)
    threads = 32 * (num_warps + ADAPTER_WARPS)
    launch(
        specialized_launch_kernel, (tiles * split_k,),
        x, x.stride(0),
        describe(x, block_m, block_k),
        describe(weight, block_n, block_k),
        bias if bias is not None else y,
        y, y.stride(0),
        entries, entries.stride(0),
        num_tokens * num_slices * most_ranks, num_slices * most_ranks, most_ranks,
        indices,
        places,
        plan,
        planes,
        counters,
        num_tokens,
        num_items,
        num_workers,
        K=in_features,
        SLICES=slices,
        SPLIT_K=split_k,
        LORA_STEPS=lora_steps,
        V_SPLIT_K=v_split_k,
        HAS_BIAS=bias is not None,
        HAS_COLUMN_SCALE=has_column_scale,
        HAS_ADAPTER_BIAS=has_adapter_bias,
        TILE_M=tile_m,
        ITEM_M=item_m,
        PLACES=num_places,
        RANK_BLOCKS=rank_blocks,
        SHRINK_R=shrink_r,
        SHRINK_K=shrink_k,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_R=block_r,
        RANKS=columns,
        STAGES=num_stages,
        BUFFERS=lora_stages,
        IS_SETTLED=is_settled,
        PDL=is_dependent,
        MOST_POLLS=MOST_POLLS,
        EXCHANGE=exchange,
        ADAPTER_WARPS=ADAPTER_WARPS,
        ADAPTER_REGISTERS=ADAPTER_REGISTERS[num_warps, occupancy],
        num_warps=num_warps,
        **({"maxnreg": 65536 // (threads * occupancy)} if occupancy > 1 else {}),
        **({"launch_pdl": True} if is_dependent else {}),
    )  # fmt: skip


def describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Blocks [rows, columns] of a matrix, for the copy engine."""
    layout = layout_of_block(rows, columns, tensor.dtype)
    return TensorDescriptor.from_tensor(tensor, [rows, columns], layout)


@functools.cache
def layout_of_block(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a block lies in shared memory; kept, since asking Gluon takes longer than a launch."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], ELEMENT[dtype])
