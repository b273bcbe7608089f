"""What the warps that multiply do in the specialised launch: a part of a tile of the base GEMM.

Gluon code for Hopper; see :mod:`loraplex.kernels.specialized`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraplex.kernels.specialized_adapters import thread_barrier
from loraplex.kernels.specialized_shrink import ENTRY_FIELDS

# the adapters of a tile begin no sooner than after this part of its walk, so that their number is
# known, and leave so many steps for the end; a block of theirs comes every so many steps at most
FIRST_QUARTER: gl.constexpr = gl.constexpr(4)
LAST_STEPS: gl.constexpr = gl.constexpr(2)
MOST_BETWEEN: gl.constexpr = gl.constexpr(3)


@gluon.jit
def add_step(
    acc, step, count,
    x_tiles, w_tiles, x_buffers, w_buffers, arrived,
    first_row, first_column, first_step,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """acc plus one block of K of W x^T; the stage of the step before it is filled again."""
    stage = step % STAGES
    mbarrier.wait(arrived.index(stage), step // STAGES & 1)
    x = x_buffers.index(stage).permute((1, 0))
    acc = warpgroup_mma(w_buffers.index(stage), x, acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    later = step - 1 + STAGES
    if (step > 0) & (later < count):
        free = (step - 1) % STAGES
        k = (first_step + later) * BLOCK_K
        barrier = arrived.index(free)
        mbarrier.expect(barrier, BYTES)
        tma.async_copy_global_to_shared(w_tiles, [first_column, k], barrier, w_buffers.index(free))
        tma.async_copy_global_to_shared(x_tiles, [first_row, k], barrier, x_buffers.index(free))
    return acc


@gluon.jit
def add_block(acc, block, b_tiles, v_tiles, filled, used, BUFFERS: gl.constexpr):
    """acc plus one block of B v^T, once the warps with the adapters have brought it."""
    buffer = block % BUFFERS
    mbarrier.wait(filled.index(buffer), block // BUFFERS & 1)
    v = v_tiles.index(buffer).permute((1, 0))
    acc = warpgroup_mma(b_tiles.index(buffer), v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    thread_barrier()
    mbarrier.arrive(used.index(buffer))
    return acc


@gluon.jit
def add_both(
    acc, done, begin, end, middle, between, num_blocks, count,
    x_tiles, w_tiles, x_buffers, w_buffers, arrived, b_tiles, v_tiles, filled, used,
    first_row, first_column, first_step,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """acc plus the steps from ``begin`` to ``end``, with a block of the adapters before every so
    many of them; and how many blocks are done."""
    for step in range(begin, end):
        if (done < num_blocks) & ((step - middle) % between == 0):
            acc = warpgroup_mma_wait(0, deps=(acc,))
            acc = add_block(acc, done, b_tiles, v_tiles, filled, used, BUFFERS)
            done += 1
        acc = add_step(
            acc, step, count,
            x_tiles, w_tiles, x_buffers, w_buffers, arrived,
            first_row, first_column, first_step, BLOCK_K, STAGES, BYTES,
        )  # fmt: skip
    return acc, done


@gluon.jit
def finish_tile(
    acc,
    entries_ptr, stride_el,
    indices_ptr,
    bias_ptr,
    num_tokens, first_row, part, start, first, width,
    PRODUCT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_COLUMN_SCALE: gl.constexpr, HAS_ADAPTER_BIAS: gl.constexpr,
):  # fmt: skip
    """acc * column_scale + bias + adapter_bias, the last columns of each row's own adapter."""
    column = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, PRODUCT))
    is_column = column < width
    if HAS_COLUMN_SCALE or HAS_ADAPTER_BIAS:
        row = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, PRODUCT))
        index = gl.load(indices_ptr + row, mask=row < num_tokens, other=-1)
        entry = entries_ptr + index.to(gl.int64) * stride_el + part * ENTRY_FIELDS
    if HAS_COLUMN_SCALE:
        address = gl.load(entry + 6, mask=index >= 0, other=0)
        mask = is_column[:, None] & (address != 0)[None, :]
        ptr = address.to(gl.pointer_type(gl.float32))
        acc *= gl.load(ptr[None, :] + column[:, None], mask=mask, other=1.0)
    if HAS_BIAS:
        bias = gl.load(bias_ptr + start + column, mask=is_column, other=0.0)
        acc += bias.to(gl.float32)[:, None]
    if HAS_ADAPTER_BIAS:
        address = gl.load(entry + 7, mask=index >= 0, other=0)
        mask = is_column[:, None] & (address != 0)[None, :]
        ptr = address.to(gl.pointer_type(gl.float32))
        acc += gl.load(ptr[None, :] + column[:, None], mask=mask, other=0.0)
    return acc


@gluon.jit
def stream_role(
    x_tiles, w_tiles, bias_ptr,
    y_ptr, stride_ym,
    entries_ptr, stride_el,
    indices_ptr,
    planes_ptr,
    counters_ptr,
    x_buffers, w_buffers, arrived, b_tiles, v_tiles, blocks, counted, filled, used,
    split, number, tiles, first_row, part, start, first, width, first_step, count, num_tokens,
    SPLIT_K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_COLUMN_SCALE: gl.constexpr, HAS_ADAPTER_BIAS: gl.constexpr,
    IS_SETTLED: gl.constexpr, PDL: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """One part of a tile of W x^T; the first adds the adapters and the other parts, and stores.

    The adapters' blocks are added between the last steps, as late as their number allows.
    """
    DTYPE: gl.constexpr = w_tiles.dtype
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [NUM_WARPS, 1], [16, BLOCK_M, 16])
    BYTES: gl.constexpr = (BLOCK_N + BLOCK_M) * BLOCK_K * 2
    if PDL and not IS_SETTLED:
        gdc_wait()
    for stage in gl.static_range(STAGES):
        if stage < count:
            mbarrier.expect(arrived.index(stage), BYTES)
            tma.async_copy_global_to_shared(
                w_tiles, [start + first, (first_step + stage) * BLOCK_K],
                arrived.index(stage), w_buffers.index(stage),
            )  # fmt: skip
    if PDL:
        if IS_SETTLED:
            gdc_wait()
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES):
        if stage < count:
            tma.async_copy_global_to_shared(
                x_tiles, [first_row, (first_step + stage) * BLOCK_K],
                arrived.index(stage), x_buffers.index(stage),
            )  # fmt: skip

    # the base, and when to turn to the adapters
    acc = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=PRODUCT)
    early = 0
    if split == 0:
        early = count // FIRST_QUARTER
    for step in range(early):
        acc = add_step(
            acc, step, count,
            x_tiles, w_tiles, x_buffers, w_buffers, arrived,
            first_row, start + first, first_step, BLOCK_K, STAGES, BYTES,
        )  # fmt: skip
    num_blocks = 0
    middle = gl.maximum(count - LAST_STEPS, early)
    between = 1
    if split == 0:
        mbarrier.wait(counted, 0)
        num_blocks = gl.max(blocks.load(gl.BlockedLayout([1], [32], [NUM_WARPS], [0])), axis=0)
        if num_blocks > 0:
            between = gl.maximum((count - early) // (num_blocks + 1), 1)
            between = gl.minimum(between, MOST_BETWEEN)
            middle = gl.maximum(count - gl.maximum(num_blocks * between, LAST_STEPS), early)
    for step in range(early, middle):
        acc = add_step(
            acc, step, count,
            x_tiles, w_tiles, x_buffers, w_buffers, arrived,
            first_row, start + first, first_step, BLOCK_K, STAGES, BYTES,
        )  # fmt: skip
    late = gl.maximum(count - LAST_STEPS, middle)
    acc, done = add_both(
        acc, gl.to_tensor(0), middle, late, middle, between, num_blocks, count,
        x_tiles, w_tiles, x_buffers, w_buffers, arrived, b_tiles, v_tiles, filled, used,
        first_row, start + first, first_step, BLOCK_K, STAGES, BUFFERS, BYTES,
    )  # fmt: skip

    # The other parts have fewer steps, so they are there by now. They are asked for before the
    # last steps, and their sum has a fixed order.
    lane_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, PRODUCT))
    lane_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, PRODUCT))
    inner = lane_n[:, None] * BLOCK_M + lane_m[None, :]
    stride_plane = tiles.to(gl.int64) * (BLOCK_M * BLOCK_N)
    plane = planes_ptr + number.to(gl.int64) * (BLOCK_M * BLOCK_N)
    parts_arrived = counters_ptr + 2 + number
    others = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, layout=PRODUCT)
    if SPLIT_K > 1:
        if split == 0:
            while gl.atomic_add(parts_arrived, 0, sem="acquire", scope="gpu") < SPLIT_K - 1:
                pass
            others = gl.load(plane + inner)
            for other in gl.static_range(1, SPLIT_K - 1):
                others += gl.load(plane + other * stride_plane + inner)
            # nobody else looks at it: back to zero, for the next launch
            gl.store(parts_arrived, 0)
    acc, done = add_both(
        acc, done, late, count, middle, between, num_blocks, count,
        x_tiles, w_tiles, x_buffers, w_buffers, arrived, b_tiles, v_tiles, filled, used,
        first_row, start + first, first_step, BLOCK_K, STAGES, BUFFERS, BYTES,
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=(acc,))
    for block in range(done, num_blocks):
        acc = add_block(acc, block, b_tiles, v_tiles, filled, used, BUFFERS)

    if split > 0:
        gl.store(plane + (split - 1) * stride_plane + inner, acc)
        # every warp has stored before one thread tells
        thread_barrier()
        gl.atomic_add(parts_arrived, 1, sem="release", scope="gpu")
    else:
        if SPLIT_K > 1:
            acc += others
        acc = finish_tile(
            acc,
            entries_ptr, stride_el,
            indices_ptr,
            bias_ptr,
            num_tokens, first_row, part, start, first, width,
            PRODUCT, BLOCK_M, BLOCK_N, HAS_BIAS, HAS_COLUMN_SCALE, HAS_ADAPTER_BIAS,
        )  # fmt: skip
        STORE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, NUM_WARPS], [0, 1])
        result = gl.convert_layout(acc.to(DTYPE), STORE)
        column = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, STORE))
        row = first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, STORE))
        target = y_ptr + row.to(gl.int64)[None, :] * stride_ym + (start + column)[:, None]
        gl.store(target, result, mask=(row < num_tokens)[None, :] & (column < width)[:, None])
