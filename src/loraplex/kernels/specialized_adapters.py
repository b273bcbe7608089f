"""The warps with the adapters in the specialised launch: shares of the shrink, then B and v.

Gluon code for Hopper; see :mod:`loraplex.kernels.specialized`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)
from triton.language.extra.cuda import gdc_wait

from loraplex.kernels.specialized_shrink import (
    ENTRY_FIELDS,
    PLAN_HEADER,
    ROWS,
    find_share,
    load_a,
    load_share,
    open_share,
    run_shares,
)

# the name that a barrier of a partition's warps had before Triton 3.7
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

# so many rows have few words of v
FEW_ROWS: gl.constexpr = gl.constexpr(16)
# flags of launches are 1 to 255; int32 before the words (loraplex.counters)
MOST_FLAG: gl.constexpr = gl.constexpr(255)
EXCHANGE_HEADER: gl.constexpr = gl.constexpr(16)


@gluon.jit
def begin_copy(
    b_tile, block, b_address, stride_bn, place_rank, place, column,
    RANKS: gl.constexpr, SELECT: gl.constexpr, SPREAD: gl.constexpr, COPY: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """Begin to copy a block of B [N, BLOCK_R] to shared memory, RANKS columns for each of its
    adapters; zeros past the rank and past the last adapter."""
    BLOCK_R: gl.constexpr = b_tile.shape[1]
    PER_BLOCK: gl.constexpr = BLOCK_R // RANKS
    # of each of its adapters where its B is, the stride of its rows, and its rank
    own = block * PER_BLOCK + gl.arange(0, PER_BLOCK, layout=gl.SliceLayout(1, SELECT))
    is_own = own[:, None] == place[None, :]
    address = gl.sum(gl.where(is_own, b_address[None, :], 0), axis=1)
    stride = gl.sum(gl.where(is_own, stride_bn[None, :], 0), axis=1)
    rank = gl.sum(gl.where(is_own, place_rank[None, :], 0), axis=1)
    # the same of each of its columns
    lane = gl.arange(0, RANKS, layout=gl.SliceLayout(0, SPREAD))[None, :]
    address = gl.convert_layout(address, gl.SliceLayout(1, SPREAD))[:, None]
    stride = gl.convert_layout(stride, gl.SliceLayout(1, SPREAD))[:, None]
    rank = gl.convert_layout(rank, gl.SliceLayout(1, SPREAD))[:, None]
    # bytes, since the addresses are
    address = gl.reshape(address + lane * 2, [BLOCK_R])
    stride = gl.reshape(stride + lane * 0, [BLOCK_R])
    # in groups of 8
    there = gl.reshape((rank > lane // 8 * 8).to(gl.int32), [BLOCK_R])
    address = gl.convert_layout(address, gl.SliceLayout(0, COPY))
    stride = gl.convert_layout(stride, gl.SliceLayout(0, COPY))
    there = gl.convert_layout(there, gl.SliceLayout(0, COPY))
    ptr = (address[None, :] + 2 * (column[:, None].to(gl.int64) * stride[None, :])).to(
        gl.pointer_type(DTYPE)
    )
    ptr = gl.multiple_of(gl.max_contiguous(ptr, [1, 8]), [1, 16])
    mask = gl.max_constancy((column >= 0)[:, None] & (there > 0)[None, :], [1, 8])
    async_copy.async_copy_global_to_shared(b_tile, ptr, mask=mask)


@gluon.jit
def meet(counters_ptr, has_shares, has_blocks, num_workers, MOST_POLLS: gl.constexpr):
    """Tell that this program's shares are done, and wait for the others'.

    Who looks at many words again and again is in the way of their writers, so a counter says when.
    It orders nothing: only a word itself says that it is there. Warps wait apart, so nothing that
    they have to agree on may come of it.
    """
    polls = 0
    if has_shares:
        gl.atomic_add(counters_ptr, 1, sem="relaxed", scope="gpu")
    if has_blocks:
        while (polls < MOST_POLLS) & (gl.load(counters_ptr, volatile=True) < num_workers):
            polls += 1


@gluon.jit
def look_for_v(
    v_ptr, stride_vk, stride_vm, flag,
    row, row_rank,
    V_SPLIT_K: gl.constexpr, RANKS: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """v [BLOCK_M, RANKS] of rows whose adapters have these ranks, zeros past them; and whether all
    of it has this launch's flag. Until then it is to be read again, past the nearest cache."""
    lane = gl.arange(0, RANKS, layout=gl.SliceLayout(0, ROW))
    offset = row[:, None] * stride_vm + lane[None, :]
    # in groups of 8, as they were written
    mask = gl.max_constancy((lane // 8 * 8)[None, :] < row_rank[:, None], [1, 8])
    others = gl.zeros((row.shape[0], RANKS), gl.int32, layout=ROW)
    v = gl.zeros((row.shape[0], RANKS), gl.float32, layout=ROW)
    for k_part in gl.static_range(V_SPLIT_K):
        ptr = v_ptr + (offset + k_part * stride_vk)
        ptr = gl.multiple_of(gl.max_contiguous(ptr, [1, 8]), [1, 16])
        word = gl.load(ptr, mask=mask, other=0, volatile=True)
        others = others | (word ^ flag)
        v += (word & -0x100).to(gl.float32, bitcast=True)
    others = gl.where(mask, others & 0xFF, 0)
    return v, gl.max(gl.max(others, axis=1), axis=0) == 0


@gluon.jit
def wait_for_v(
    v_ptr, stride_vk, stride_vm, flag,
    row, row_rank,
    V_SPLIT_K: gl.constexpr, RANKS: gl.constexpr, ROW: gl.constexpr, MOST_POLLS: gl.constexpr,
):  # fmt: skip
    """The same once all of it is there, or as it is after so many looks."""
    v, is_there = look_for_v(
        v_ptr, stride_vk, stride_vm, flag, row, row_rank, V_SPLIT_K, RANKS, ROW
    )
    polls = 0
    while (not is_there) & (polls < MOST_POLLS):
        v, is_there = look_for_v(
            v_ptr, stride_vk, stride_vm, flag, row, row_rank, V_SPLIT_K, RANKS, ROW
        )
        polls += 1
    return v, is_there


@gluon.jit
def fill_v(v_tile, v, row_place, first_place, TILE: gl.constexpr):
    """A block's v [BLOCK_M, BLOCK_R] to shared memory: zero where a column is not of the row's
    adapter."""
    BLOCK_M: gl.constexpr = v_tile.shape[0]
    BLOCK_R: gl.constexpr = v_tile.shape[1]
    PER_BLOCK: gl.constexpr = BLOCK_R // v.shape[1]
    lane = gl.arange(0, PER_BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, TILE)))
    is_own = row_place[:, None] == first_place + lane[None, :]
    zero = gl.zeros([BLOCK_M, PER_BLOCK, v.shape[1]], v.dtype, layout=TILE)
    v_tile.store(gl.reshape(gl.where(is_own[:, :, None], v[:, None, :], zero), [BLOCK_M, BLOCK_R]))


@gluon.jit
def feed_blocks(
    v, num_blocks, row_place, b_address, stride_bn, place_rank, place, column,
    b_tiles, v_tiles, filled, used,
    BUFFERS: gl.constexpr, TILE: gl.constexpr, SELECT: gl.constexpr, SPREAD: gl.constexpr,
    COPY: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Every block of a tile, B and v, to shared memory, as the warps that multiply use them up."""
    RANKS: gl.constexpr = v.shape[1]
    PER_BLOCK: gl.constexpr = TILE.threads_per_warp[1]
    own_v = gl.convert_layout(v.to(DTYPE), gl.SliceLayout(1, TILE))
    for block in range(num_blocks):
        buffer = block % BUFFERS
        fill_v(v_tiles.index(buffer), own_v, row_place, block * PER_BLOCK, TILE)
        async_copy.wait_group(BUFFERS - 1)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(filled.index(buffer))
        if block + BUFFERS < num_blocks:
            mbarrier.wait(used.index(buffer), block // BUFFERS & 1)
            begin_copy(
                b_tiles.index(buffer), block + BUFFERS, b_address, stride_bn, place_rank, place,
                column, RANKS, SELECT, SPREAD, COPY, DTYPE,
            )  # fmt: skip
        async_copy.commit_group()


@gluon.jit
def close_launch(counters_ptr, exchange_ptr, number, num_words, NUM_WARPS: gl.constexpr):
    """The last program sets the counters back and the launch's number on: nobody looks any more.

    ``exchange_ptr``: number of the launch, most words in use since all were zero, 14 free, words.
    """
    # every warp has looked before one thread tells
    thread_barrier()
    if gl.atomic_add(counters_ptr + 1, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        gl.store(counters_ptr, 0)
        gl.store(counters_ptr + 1, 0)
        most = gl.maximum(gl.load(exchange_ptr + 1, volatile=True), num_words)
        number += 1
        if number == MOST_FLAG:
            # flags begin again: no word may have an old one
            FOUR: gl.constexpr = gl.BlockedLayout([4], [32], [NUM_WARPS], [0])
            word = gl.arange(0, 128 * NUM_WARPS, layout=FOUR)
            for first in range(0, most, 128 * NUM_WARPS):
                mask = first + word < most
                gl.store(exchange_ptr + EXCHANGE_HEADER + first + word, 0, mask=mask)
            number = 0
            most = 0
        # every warp has read what is written now
        thread_barrier()
        gl.store(exchange_ptr, number)
        gl.store(exchange_ptr + 1, most)


@gluon.jit
def adapter_role(
    x_ptr, stride_xm,
    entries_ptr, stride_el,
    stride_vk, stride_vm, stride_vs,
    indices_ptr,
    places_ptr,
    plan_ptr,
    counters_ptr,
    b_tiles, v_tiles, blocks, counted, filled, used,
    pid, first_row, part, first, width, has_lora, num_tokens, num_items, num_workers,
    K: gl.constexpr, NUM_SLICES: gl.constexpr, V_SPLIT_K: gl.constexpr, TILE_M: gl.constexpr,
    ITEM_M: gl.constexpr, PLACES: gl.constexpr, RANK_BLOCKS: gl.constexpr, SHRINK_R: gl.constexpr,
    SHRINK_K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_R: gl.constexpr,
    RANKS: gl.constexpr, BUFFERS: gl.constexpr, IS_SETTLED: gl.constexpr, PDL: gl.constexpr,
    MOST_POLLS: gl.constexpr, EXCHANGE: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """This program's shares of the shrink; then, of a tile's first part, its blocks of B and v.

    A block has RANKS columns for each of BLOCK_R / RANKS adapters. How many there are goes to
    ``blocks`` (barrier ``counted``); block i goes to buffer i % BUFFERS of ``b_tiles`` and
    ``v_tiles`` (barriers ``filled``, and ``used`` the other way).
    v [V_SPLIT_K, M, S, R] lies EXCHANGE behind the counters. Each of its words says which launch
    wrote it, so that whoever needs it looks at the word itself, without a fence.
    """
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NUM_WARPS, 1, 1], [1, 16, 8])
    # 8 of K beside each other in a lane, of x and A alike: their loads are of 16 bytes
    X: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 8)
    A: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 8)
    V: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    LANES_R: gl.constexpr = BLOCK_R // 8
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES_R, LANES_R], [NUM_WARPS, 1], [1, 0])
    # the same with a block's adapters as an axis of its own; one of them; and one value for each
    PER_BLOCK: gl.constexpr = BLOCK_R // RANKS
    TILE: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [32 // LANES_R, PER_BLOCK, RANKS // 8], [NUM_WARPS, 1, 1], [2, 1, 0]
    )
    # Every word of v is looked at by one thread: of two that look, one may see it and one not.
    PER_THREAD: gl.constexpr = BLOCK_M * RANKS // (32 * NUM_WARPS)
    WORDS: gl.constexpr = PER_THREAD if PER_THREAD < 8 else 8
    ROW: gl.constexpr = gl.BlockedLayout(
        [1, WORDS], [32 * WORDS // RANKS, RANKS // WORDS], [NUM_WARPS, 1], [1, 0]
    )
    LANES_P: gl.constexpr = PLACES if PLACES < 32 else 32
    SELECT: gl.constexpr = gl.BlockedLayout(
        [1, 1], [32 // LANES_P, LANES_P], [NUM_WARPS, 1], [1, 0]
    )
    SPREAD: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // LANES_R * PER_BLOCK, RANKS // 8], [NUM_WARPS, 1], [1, 0]
    )
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    PER_ITEM: gl.constexpr = ITEM_M // ROWS * NUM_SLICES * RANK_BLOCKS * V_SPLIT_K

    # planes of v are whole groups of 8, which the compiler sees by this
    stride_vk = stride_vk // 8 * 8
    if PDL and not IS_SETTLED:
        gdc_wait()
    # Each round of loads costs a latency, and while W streams that is more than a microsecond:
    # what does not depend on each other is asked for together. First what the plan says...
    plan_tiles = (num_tokens + TILE_M - 1) // TILE_M
    most_shares = plan_tiles * num_items * PER_ITEM
    share = gl.where(pid < num_workers, pid, most_shares)
    stride_share = num_workers
    plan = plan_ptr + first_row // TILE_M * (PLAN_HEADER + 4 * TILE_M)
    num_places = gl.load(plan)
    place = gl.arange(0, PLACES, layout=gl.SliceLayout(0, SELECT))
    place_slot = gl.load(plan + PLAN_HEADER + place, mask=place < TILE_M, other=0)
    row = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ROW))
    row = gl.minimum(row, num_tokens - 1)
    row_slot = gl.load(indices_ptr + row)
    lane = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, gl.SliceLayout(2, TILE)))
    row_place = gl.load(places_ptr + gl.minimum(lane, num_tokens - 1))
    slot, rows, num_rows, k_part, share_part, first_rank = find_share(
        share, most_shares, num_items,
        plan_ptr,
        NUM_SLICES, V_SPLIT_K, TILE_M, ITEM_M, RANK_BLOCKS, SHRINK_R,
    )  # fmt: skip
    there = gl.load(plan_ptr + 1)
    # ... then of the tile's adapters and of the share's what the table says
    is_place = has_lora & (place < num_places)
    place_slot = gl.where(is_place, place_slot, 0)
    entry = entries_ptr + place_slot.to(gl.int64) * stride_el + part * ENTRY_FIELDS
    b_address = gl.load(entry + 2, mask=is_place, other=0)
    stride_bn = gl.load(entry + 3, mask=is_place, other=0)
    place_rank = gl.load(entry + 4, mask=is_place, other=0).to(gl.int32)
    a_address, stride_ar, rank, scaling, x_row, v_row = open_share(
        slot, rows, num_rows, share_part,
        entries_ptr, stride_el,
        X, V,
    )  # fmt: skip
    has_slot = has_lora & (row_slot >= 0)
    row_slot = gl.where(has_slot, row_slot, 0)
    entry = entries_ptr + row_slot.to(gl.int64) * stride_el + part * ENTRY_FIELDS
    row_rank = gl.load(entry + 4, mask=has_slot, other=0).to(gl.int32)

    # how many blocks the tile has; then A of the first share and B of the first blocks
    num_blocks = 0
    if has_lora:
        num_blocks = (num_places + PER_BLOCK - 1) // PER_BLOCK
        blocks.store(gl.zeros((32,), gl.int32, layout=ONE) + num_blocks)
        thread_barrier()
        mbarrier.arrive(counted)
    a = load_a(
        a_address, stride_ar, k_part, first_rank, rank,
        K, V_SPLIT_K, SHRINK_R, SHRINK_K, A, NUM_WARPS, DTYPE,
    )  # fmt: skip
    column = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
    column = gl.minimum(column, width - 1)
    for b in gl.static_range(BUFFERS):
        if b < num_blocks:
            begin_copy(
                b_tiles.index(b), b, b_address, stride_bn, place_rank, place, column,
                RANKS, SELECT, SPREAD, COPY, DTYPE,
            )  # fmt: skip
        async_copy.commit_group()
    # one tile of the plan: as many as there are items; else as many as there could be
    num_shares = gl.where(plan_tiles == 1, there * PER_ITEM, most_shares)
    share = gl.where(pid < num_workers, pid, num_shares)
    if PDL and IS_SETTLED:
        gdc_wait()
    exchange_ptr = counters_ptr + EXCHANGE
    number = gl.load(exchange_ptr, volatile=True)
    v_ptr = exchange_ptr + EXCHANGE_HEADER

    # the shares; then the blocks, which need the shares of all programs
    is_alone = False
    is_over = False
    while not is_over:
        run_shares(
            share, num_shares, stride_share, most_shares, num_items,
            x_ptr, stride_xm,
            plan_ptr,
            entries_ptr, stride_el,
            v_ptr, stride_vk, stride_vm, stride_vs, number + 1,
            a, a_address, stride_ar, x_row, v_row, num_rows, k_part, share_part, first_rank, rank,
            scaling,
            K, NUM_SLICES, V_SPLIT_K, TILE_M, ITEM_M, RANK_BLOCKS, SHRINK_R, SHRINK_K, X, A,
            PRODUCT, V, NUM_WARPS,
        )  # fmt: skip
        # what this program has left for itself is there after this
        thread_barrier()
        if BLOCK_M > FEW_ROWS:
            if not is_alone:
                meet(counters_ptr, pid < num_workers, num_blocks > 0, num_workers, MOST_POLLS)
        is_over = num_blocks == 0
        if not is_over:
            v, is_there = wait_for_v(
                v_ptr + part * stride_vs, stride_vk, stride_vm, number + 1,
                row, row_rank,
                V_SPLIT_K, RANKS, ROW, MOST_POLLS,
            )  # fmt: skip
            is_over = is_there | is_alone
            if is_over:
                feed_blocks(
                    v, num_blocks, row_place, b_address, stride_bn, place_rank, place, column,
                    b_tiles, v_tiles, filled, used, BUFFERS, TILE, SELECT, SPREAD, COPY, DTYPE,
                )  # fmt: skip
        if not is_over:
            # Who has the shares that are missing may have no multiprocessor yet, and this program
            # may be in its way: it computes all, to the same bits, and looks once more.
            is_alone = True
            share = 0
            stride_share = 1
            (
                a, a_address, stride_ar, x_row, v_row, num_rows, k_part, share_part, first_rank,
                rank, scaling,
            ) = load_share(
                share, most_shares, num_items,
                plan_ptr,
                entries_ptr, stride_el,
                K, NUM_SLICES, V_SPLIT_K, TILE_M, ITEM_M, RANK_BLOCKS, SHRINK_R, SHRINK_K, X, A, V,
                NUM_WARPS, DTYPE,
            )  # fmt: skip
    close_launch(counters_ptr, exchange_ptr, number, V_SPLIT_K * stride_vk, NUM_WARPS)
