"""What the warps with the adapters do in the specialised launch: the shrink, then B and v.

A share of the shrink is up to 16 rows of one adapter, some of its ranks and a part of K. Gluon code
for Hopper; see :mod:`loraplex.kernels.specialized`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    mma_v2,
)
from triton.language.extra.cuda import gdc_wait

# the name that a barrier of a partition's warps had before Triton 3.7
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

# int32 before the lists of a plan (loraplex.reference.routing), fields of a record of a table
PLAN_HEADER: gl.constexpr = gl.constexpr(16)
ENTRY_FIELDS: gl.constexpr = gl.constexpr(8)
ROWS: gl.constexpr = gl.constexpr(16)
# more steps of a share are a loop, with the loads of one under the product of the one before
MOST_UNROLLED: gl.constexpr = gl.constexpr(4)


@gluon.jit
def load_block(
    base_ptr, offset, is_there, column, step,
    STEP: gl.constexpr, K: gl.constexpr, V_SPLIT_K: gl.constexpr, AXIS: gl.constexpr,
):  # fmt: skip
    """One step of a share's x or A, whose K lies along ``AXIS``; zeros past the end."""
    # hints hold for the operation that makes a value, so it has to be one of this function
    ptr = base_ptr + (offset + step * STEP)
    mask = is_there
    if AXIS == 2:
        ptr = gl.multiple_of(gl.max_contiguous(ptr, [1, 1, 8]), [1, 1, 16])
        if K % (STEP * V_SPLIT_K) != 0:
            mask = mask & gl.max_constancy(column + step * STEP < K, [1, 1, 8])
    else:
        ptr = gl.multiple_of(gl.max_contiguous(ptr, [1, 8, 1]), [1, 16, 1])
        if K % (STEP * V_SPLIT_K) != 0:
            mask = mask & gl.max_constancy(column + step * STEP < K, [1, 8, 1])
    return gl.load(ptr, mask=mask, other=0.0)


@gluon.jit
def load_share(
    share, num_shares, num_items,
    plan_ptr,
    entries_ptr, stride_el,
    K: gl.constexpr, NUM_SLICES: gl.constexpr, V_SPLIT_K: gl.constexpr, TILE_M: gl.constexpr,
    ITEM_M: gl.constexpr, RANK_BLOCKS: gl.constexpr, SHRINK_R: gl.constexpr,
    SHRINK_K: gl.constexpr, X: gl.constexpr, A: gl.constexpr, V: gl.constexpr,
    NUM_WARPS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """What a share needs but x: which rows, where its A is, and the first block of A.

    A block of A is SHRINK_K of K for each warp: [NUM_WARPS, SHRINK_K, SHRINK_R].
    """
    PIECES: gl.constexpr = ITEM_M // ROWS
    STEP: gl.constexpr = SHRINK_K * NUM_WARPS
    STEPS: gl.constexpr = (K + STEP * V_SPLIT_K - 1) // (STEP * V_SPLIT_K)
    # which share
    k_part = share % V_SPLIT_K
    rest = share // V_SPLIT_K
    block = rest % (NUM_SLICES * RANK_BLOCKS)
    rest = rest // (NUM_SLICES * RANK_BLOCKS)
    first_row = rest % PIECES * ROWS
    item = rest // PIECES
    part = block // RANK_BLOCKS
    first_rank = block % RANK_BLOCKS * SHRINK_R

    # whose it is: a tile may have fewer items than the most
    is_share = share < num_shares
    plan = plan_ptr + item // num_items * (PLAN_HEADER + 4 * TILE_M)
    item = item % num_items
    is_item = is_share & (item < gl.load(plan + 1, mask=is_share, other=0))
    packed = gl.load(plan + PLAN_HEADER + 2 * TILE_M + item, mask=is_item, other=0)
    slot = gl.load(plan + PLAN_HEADER + 3 * TILE_M + item, mask=is_item, other=-1)
    num_rows = gl.maximum((packed & 0xFF) - first_row, 0)
    has_rows = (slot >= 0) & (num_rows > 0)
    entry = entries_ptr + slot.to(gl.int64) * stride_el + part * ENTRY_FIELDS
    a_address = gl.load(entry, mask=has_rows, other=0)
    stride_ar = gl.load(entry + 1, mask=has_rows, other=0)
    rank = gl.load(entry + 4, mask=has_rows, other=0).to(gl.int32)
    scaling = gl.load(entry + 5, mask=has_rows, other=0).to(gl.int32).to(gl.float32, bitcast=True)

    # its first block of A
    lane_k = gl.arange(0, SHRINK_K, layout=gl.SliceLayout(0, gl.SliceLayout(2, A)))
    warp = gl.arange(0, NUM_WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, A)))
    ranks = first_rank + gl.arange(0, SHRINK_R, layout=gl.SliceLayout(0, gl.SliceLayout(1, A)))
    column = k_part * (STEPS * STEP) + lane_k[None, :, None] + warp[:, None, None] * SHRINK_K
    a_ptr = a_address.to(gl.pointer_type(DTYPE))
    offset = ranks[None, None, :].to(gl.int64) * stride_ar + column
    a = load_block(a_ptr, offset, ranks[None, None, :] < rank, column, 0, STEP, K, V_SPLIT_K, 1)

    # its rows, once for loads of x and once for stores of v
    rows = plan + PLAN_HEADER + TILE_M + (packed >> 8) + first_row
    lane = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))
    x_row = gl.load(rows + lane, mask=lane < num_rows, other=0)
    lane = gl.arange(0, ROWS, layout=gl.SliceLayout(1, V))
    v_row = gl.load(rows + lane, mask=lane < num_rows, other=0)
    return (
        a, a_address, stride_ar, x_row, v_row, num_rows, k_part, part, first_rank, rank, scaling,
    )  # fmt: skip


@gluon.jit
def finish_share(
    x_ptr, stride_xm,
    v_ptr, stride_vk, stride_vm, stride_vs,
    a, a_address, stride_ar, x_row, v_row, num_rows, k_part, part, first_rank, rank, scaling,
    K: gl.constexpr, V_SPLIT_K: gl.constexpr, SHRINK_R: gl.constexpr, SHRINK_K: gl.constexpr,
    X: gl.constexpr, A: gl.constexpr, PRODUCT: gl.constexpr, V: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Write a share's scaling * x A^T to its plane of v; each warp sums a strip of K."""
    STEP: gl.constexpr = SHRINK_K * NUM_WARPS
    STEPS: gl.constexpr = (K + STEP * V_SPLIT_K - 1) // (STEP * V_SPLIT_K)
    first_column = k_part * (STEPS * STEP)
    lane_k = gl.arange(0, SHRINK_K, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))
    warp = gl.arange(0, NUM_WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))
    lane = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))
    x_column = first_column + lane_k[None, None, :] + warp[:, None, None] * SHRINK_K
    is_row = (lane < num_rows)[None, :, None]
    x_offset = x_row[None, :, None].to(gl.int64) * stride_xm + x_column
    lane_k = gl.arange(0, SHRINK_K, layout=gl.SliceLayout(0, gl.SliceLayout(2, A)))
    warp = gl.arange(0, NUM_WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, A)))
    ranks = first_rank + gl.arange(0, SHRINK_R, layout=gl.SliceLayout(0, gl.SliceLayout(1, A)))
    a_column = first_column + lane_k[None, :, None] + warp[:, None, None] * SHRINK_K
    a_ptr = a_address.to(gl.pointer_type(x_ptr.dtype.element_ty))
    a_offset = ranks[None, None, :].to(gl.int64) * stride_ar + a_column
    x = load_block(x_ptr, x_offset, is_row, x_column, 0, STEP, K, V_SPLIT_K, 2)
    acc = gl.zeros((NUM_WARPS, ROWS, SHRINK_R), gl.float32, layout=PRODUCT)
    is_rank = ranks[None, None, :] < rank
    if STEPS <= MOST_UNROLLED:
        acc = mma_v2(x, a, acc)
        for step in gl.static_range(1, STEPS):
            x = load_block(x_ptr, x_offset, is_row, x_column, step, STEP, K, V_SPLIT_K, 2)
            a = load_block(a_ptr, a_offset, is_rank, a_column, step, STEP, K, V_SPLIT_K, 1)
            acc = mma_v2(x, a, acc)
    else:
        for step in range(1, STEPS):
            later_x = load_block(x_ptr, x_offset, is_row, x_column, step, STEP, K, V_SPLIT_K, 2)
            later_a = load_block(a_ptr, a_offset, is_rank, a_column, step, STEP, K, V_SPLIT_K, 1)
            acc = mma_v2(x, a, acc)
            x = later_x
            a = later_a
        acc = mma_v2(x, a, acc)
    total = gl.sum(acc, axis=0) * scaling
    lane = gl.arange(0, ROWS, layout=gl.SliceLayout(1, V))
    ranks = first_rank + gl.arange(0, SHRINK_R, layout=gl.SliceLayout(0, V))
    target = v_ptr + k_part.to(gl.int64) * stride_vk + part * stride_vs
    target = target + (v_row.to(gl.int64)[:, None] * stride_vm + ranks[None, :])
    gl.store(target, total, mask=(lane < num_rows)[:, None] & (ranks < rank)[None, :])


@gluon.jit
def spread(per_group, step, GROUPS: gl.constexpr, BLOCK_R: gl.constexpr):
    """A value per group of 8 columns, for each of the columns; ``step`` more from one to next."""
    inner = gl.arange(0, 8, layout=gl.SliceLayout(0, GROUPS)).to(per_group.dtype)
    return gl.reshape(per_group[:, None] + inner[None, :] * step, [BLOCK_R])


@gluon.jit
def find_columns(
    b_address, stride_bn, num_groups, end, place, block, BLOCK_R: gl.constexpr, GROUPS: gl.constexpr
):
    """Of each of a block's columns: where its column of B is, and the stride of its rows; the place
    of its adapter, -1 past the last; its rank.

    The columns of a tile are those of its adapters, one after the other in the order of places,
    each of which has ``num_groups`` groups of 8 and the last at ``end``.
    """
    group = block * (BLOCK_R // 8)
    group = group + gl.arange(0, BLOCK_R // 8, layout=gl.SliceLayout(1, GROUPS))
    inside = group[:, None] - (end - num_groups)[None, :]
    is_own = (inside >= 0) & (inside < num_groups[None, :])
    own_address = b_address[None, :] + inside.to(gl.int64) * 16
    address = gl.sum(gl.where(is_own, own_address, 0), axis=1)
    stride = gl.sum(gl.where(is_own, stride_bn[None, :], 0), axis=1)
    own_place = gl.sum(gl.where(is_own, place[None, :] + 1, 0), axis=1) - 1
    rank = gl.sum(gl.where(is_own, inside, 0), axis=1) * 8
    return (
        spread(address, 2, GROUPS, BLOCK_R),
        spread(stride, 0, GROUPS, BLOCK_R),
        spread(own_place, 0, GROUPS, BLOCK_R),
        spread(rank, 1, GROUPS, BLOCK_R),
    )


@gluon.jit
def copy_b(b_tile, column, address, stride, place, COPY: gl.constexpr, DTYPE: gl.constexpr):
    """Begin to copy a block's columns of B [N, BLOCK_R] to shared memory; zeros past the last."""
    address = gl.convert_layout(address, gl.SliceLayout(0, COPY))
    stride = gl.convert_layout(stride, gl.SliceLayout(0, COPY))
    place = gl.convert_layout(place, gl.SliceLayout(0, COPY))
    # bytes, since the addresses are
    ptr = (address[None, :] + 2 * (column[:, None].to(gl.int64) * stride[None, :])).to(
        gl.pointer_type(DTYPE)
    )
    ptr = gl.multiple_of(gl.max_contiguous(ptr, [1, 8]), [1, 16])
    mask = gl.max_constancy((column >= 0)[:, None] & (place >= 0)[None, :], [1, 8])
    async_copy.async_copy_global_to_shared(b_tile, ptr, mask=mask)


@gluon.jit
def fill_v(
    v_tile,
    v_ptr, stride_vk, stride_vm,
    row, row_place, place, rank,
    V_SPLIT_K: gl.constexpr, COPY: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """v of a block's columns to shared memory, zero where a column is not of the row's adapter."""
    place = gl.convert_layout(place, gl.SliceLayout(0, COPY))
    rank = gl.convert_layout(rank, gl.SliceLayout(0, COPY))
    ptr = v_ptr + (row[:, None].to(gl.int64) * stride_vm + rank[None, :])
    ptr = gl.multiple_of(gl.max_contiguous(ptr, [1, 8]), [1, 16])
    mask = (row_place[:, None] == place[None, :]) & (place >= 0)[None, :]
    mask = gl.max_constancy(mask, [1, 8])
    v = gl.load(ptr, mask=mask, other=0.0)
    for _ in gl.static_range(V_SPLIT_K - 1):
        ptr += stride_vk
        v += gl.load(ptr, mask=mask, other=0.0)
    v_tile.store(v.to(DTYPE))


@gluon.jit
def are_told(counters_ptr, num_workers):
    """Whether all programs with shares have told so."""
    return gl.atomic_add(counters_ptr, 0, sem="acquire", scope="gpu") >= num_workers


@gluon.jit
def adapter_role(
    x_ptr, stride_xm,
    entries_ptr, stride_el,
    v_ptr, stride_vk, stride_vm, stride_vs,
    places_ptr,
    plan_ptr,
    counters_ptr,
    b_tiles, v_tiles, blocks, counted, filled, used,
    pid, first_row, part, first, width, has_lora, num_tokens, num_items, num_workers,
    K: gl.constexpr, NUM_SLICES: gl.constexpr, V_SPLIT_K: gl.constexpr, TILE_M: gl.constexpr,
    ITEM_M: gl.constexpr, PLACES: gl.constexpr, RANK_BLOCKS: gl.constexpr, SHRINK_R: gl.constexpr,
    SHRINK_K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_R: gl.constexpr,
    BUFFERS: gl.constexpr, IS_SETTLED: gl.constexpr, PDL: gl.constexpr, MOST_POLLS: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """This program's shares of the shrink; then, of a tile's first part, its blocks of B and v.

    How many blocks there are goes to ``blocks`` (barrier ``counted``); block i goes to buffer
    i % BUFFERS of ``b_tiles`` and ``v_tiles`` (barriers ``filled``, and ``used`` the other way).
    """
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NUM_WARPS, 1, 1], [1, 16, 8])
    # 8 of K beside each other in a lane, of x and A alike: their loads are of 16 bytes
    X: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 8)
    A: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 8)
    V: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    LANES_R: gl.constexpr = BLOCK_R // 8
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES_R, LANES_R], [NUM_WARPS, 1], [1, 0])
    LANES_P: gl.constexpr = PLACES if PLACES < 32 else 32
    GROUPS: gl.constexpr = gl.BlockedLayout(
        [1, 1], [32 // LANES_P, LANES_P], [NUM_WARPS, 1], [1, 0]
    )
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])

    if PDL and not IS_SETTLED:
        gdc_wait()
    # one tile of the plan: as many shares as there are items; else as many as there could be
    plan_tiles = (num_tokens + TILE_M - 1) // TILE_M
    if plan_tiles == 1:
        num_items = gl.maximum(gl.load(plan_ptr + 1), 1)
    num_shares = plan_tiles * num_items * (ITEM_M // ROWS * NUM_SLICES * RANK_BLOCKS * V_SPLIT_K)
    share = pid
    stride_share = num_workers
    if pid >= num_workers:
        share = num_shares
    (
        a, a_address, stride_ar, x_row, v_row, num_rows, k_part, share_part, first_rank, rank,
        scaling,
    ) = load_share(
        share, num_shares, num_items,
        plan_ptr,
        entries_ptr, stride_el,
        K, NUM_SLICES, V_SPLIT_K, TILE_M, ITEM_M, RANK_BLOCKS, SHRINK_R, SHRINK_K, X, A, V,
        NUM_WARPS, DTYPE,
    )  # fmt: skip

    # the adapters of this tile; B of the first blocks is asked for now
    plan = plan_ptr + first_row // TILE_M * (PLAN_HEADER + 4 * TILE_M)
    place = gl.arange(0, PLACES, layout=gl.SliceLayout(0, GROUPS))
    is_place = has_lora & (place < gl.load(plan))
    slot = gl.load(plan + PLAN_HEADER + place, mask=is_place, other=0)
    entry = entries_ptr + slot.to(gl.int64) * stride_el + part * ENTRY_FIELDS
    b_address = gl.load(entry + 2, mask=is_place, other=0)
    stride_bn = gl.load(entry + 3, mask=is_place, other=0)
    num_groups = (gl.load(entry + 4, mask=is_place, other=0).to(gl.int32) + 7) // 8
    other = gl.arange(0, PLACES, layout=gl.SliceLayout(1, GROUPS))
    is_earlier = other[:, None] >= place[None, :]
    end = gl.sum(gl.where(is_earlier, num_groups[None, :], 0), axis=1)
    end = gl.convert_layout(end, gl.SliceLayout(0, GROUPS))
    num_blocks = (gl.sum(num_groups, axis=0) * 8 + BLOCK_R - 1) // BLOCK_R
    if has_lora:
        blocks.store(gl.zeros((32,), gl.int32, layout=ONE) + num_blocks)
        thread_barrier()
        mbarrier.arrive(counted)
    column = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
    column = gl.minimum(column, width - 1)
    row = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, COPY))
    row = gl.minimum(row, num_tokens - 1)
    row_place = gl.load(places_ptr + row)
    for b in gl.static_range(BUFFERS):
        if b < num_blocks:
            address, stride, own_place, own_rank = find_columns(
                b_address, stride_bn, num_groups, end, place, b, BLOCK_R, GROUPS
            )
            copy_b(b_tiles.index(b), column, address, stride, own_place, COPY, DTYPE)
        async_copy.commit_group()
    if PDL and IS_SETTLED:
        gdc_wait()

    # the shares, then the wait for those of others
    has_told = False
    is_over = False
    while not is_over:
        if share < num_shares:
            # its ranks may lie past those of the adapter
            if first_rank < rank:
                finish_share(
                    x_ptr, stride_xm,
                    v_ptr, stride_vk, stride_vm, stride_vs,
                    a, a_address, stride_ar, x_row, v_row, num_rows, k_part, share_part, first_rank,
                    rank, scaling,
                    K, V_SPLIT_K, SHRINK_R, SHRINK_K, X, A, PRODUCT, V, NUM_WARPS,
                )  # fmt: skip
            share += stride_share
        else:
            is_ready = True
            # every warp has stored before one thread tells
            thread_barrier()
            if not has_told:
                if pid < num_workers:
                    gl.atomic_add(counters_ptr, 1, sem="release", scope="gpu")
                if num_blocks > 0:
                    polls = 0
                    is_ready = are_told(counters_ptr, num_workers)
                    while (not is_ready) & (polls < MOST_POLLS):
                        polls += 1
                        is_ready = are_told(counters_ptr, num_workers)
            is_over = is_ready
            has_told = True
            # who has the shares that are missing may have no multiprocessor yet, and this program
            # may be in its way: it computes all of them, to the same bits
            share = 0
            stride_share = 1
        if not is_over:
            (
                a, a_address, stride_ar, x_row, v_row, num_rows, k_part, share_part, first_rank,
                rank, scaling,
            ) = load_share(
                share, num_shares, num_items,
                plan_ptr,
                entries_ptr, stride_el,
                K, NUM_SLICES, V_SPLIT_K, TILE_M, ITEM_M, RANK_BLOCKS, SHRINK_R, SHRINK_K, X, A, V,
                NUM_WARPS, DTYPE,
            )  # fmt: skip

    v_ptr += part * stride_vs
    for b in range(num_blocks):
        address, stride, own_place, own_rank = find_columns(
            b_address, stride_bn, num_groups, end, place, b, BLOCK_R, GROUPS
        )
        fill_v(
            v_tiles.index(b % BUFFERS),
            v_ptr, stride_vk, stride_vm,
            row, row_place, own_place, own_rank,
            V_SPLIT_K, COPY, DTYPE,
        )  # fmt: skip
        async_copy.wait_group(BUFFERS - 1)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(filled.index(b % BUFFERS))
        if b + BUFFERS < num_blocks:
            mbarrier.wait(used.index(b % BUFFERS), b // BUFFERS & 1)
            address, stride, own_place, own_rank = find_columns(
                b_address, stride_bn, num_groups, end, place, b + BUFFERS, BLOCK_R, GROUPS
            )
            copy_b(b_tiles.index(b % BUFFERS), column, address, stride, own_place, COPY, DTYPE)
        async_copy.commit_group()
    # the last of all programs sets the counters back: nobody tells or looks any more
    if gl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        gl.store(counters_ptr, 0)
        gl.store(counters_ptr + 1, 0)
