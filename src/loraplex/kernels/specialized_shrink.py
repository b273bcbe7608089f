"""The shrink of the specialised launch: a share of it, from the plan's lists to words of v.

A share is up to 16 rows of one adapter, some of its ranks and a part of K. Gluon code for Hopper;
see :mod:`loraplex.kernels.specialized`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

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
def find_share(
    share, most_shares, num_items,
    plan_ptr,
    NUM_SLICES: gl.constexpr, V_SPLIT_K: gl.constexpr, TILE_M: gl.constexpr, ITEM_M: gl.constexpr,
    RANK_BLOCKS: gl.constexpr, SHRINK_R: gl.constexpr,
):  # fmt: skip
    """Which share it is and whose: what the plan's lists say, in one round of loads.

    The lists are read before it is known how many items a tile has, since that would be one more
    round; past the last item they hold what an earlier step left.
    """
    PIECES: gl.constexpr = ITEM_M // ROWS
    k_part = share % V_SPLIT_K
    rest = share // V_SPLIT_K
    block = rest % (NUM_SLICES * RANK_BLOCKS)
    rest = rest // (NUM_SLICES * RANK_BLOCKS)
    item = rest // PIECES
    lists = plan_ptr + item // num_items * (PLAN_HEADER + 4 * TILE_M)
    item = item % num_items
    is_place = (share < most_shares) & (item < TILE_M)
    there = gl.load(lists + 1, mask=is_place, other=0)
    packed = gl.load(lists + PLAN_HEADER + 2 * TILE_M + item, mask=is_place, other=0)
    slot = gl.load(lists + PLAN_HEADER + 3 * TILE_M + item, mask=is_place, other=-1)
    slot = gl.where(item < there, slot, -1)
    first_row = rest % PIECES * ROWS
    num_rows = gl.maximum((packed & 0xFF) - first_row, 0)
    num_rows = gl.where(slot >= 0, num_rows, 0)
    rows = lists + PLAN_HEADER + TILE_M + (packed >> 8) + first_row
    return slot, rows, num_rows, k_part, block // RANK_BLOCKS, block % RANK_BLOCKS * SHRINK_R


@gluon.jit
def open_share(
    slot, rows, num_rows, part,
    entries_ptr, stride_el,
    X: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Of a share's adapter: where its A is, the stride of its rows, its rank and its scaling; and
    the share's rows, once for loads of x and once for stores of v: the second round."""
    entry = entries_ptr + slot.to(gl.int64) * stride_el + part * ENTRY_FIELDS
    has_rows = num_rows > 0
    a_address = gl.load(entry, mask=has_rows, other=0)
    stride_ar = gl.load(entry + 1, mask=has_rows, other=0)
    rank = gl.load(entry + 4, mask=has_rows, other=0).to(gl.int32)
    scaling = gl.load(entry + 5, mask=has_rows, other=0).to(gl.int32).to(gl.float32, bitcast=True)
    lane = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))
    x_row = gl.load(rows + lane, mask=lane < num_rows, other=0)
    lane = gl.arange(0, ROWS, layout=gl.SliceLayout(1, V))
    v_row = gl.load(rows + lane, mask=lane < num_rows, other=0)
    return a_address, stride_ar, rank, scaling, x_row, v_row


@gluon.jit
def load_a(
    a_address, stride_ar, k_part, first_rank, rank,
    K: gl.constexpr, V_SPLIT_K: gl.constexpr, SHRINK_R: gl.constexpr, SHRINK_K: gl.constexpr,
    A: gl.constexpr, NUM_WARPS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """A share's first block of A, SHRINK_K of K for each warp: [NUM_WARPS, SHRINK_K, SHRINK_R]."""
    STEP: gl.constexpr = SHRINK_K * NUM_WARPS
    STEPS: gl.constexpr = (K + STEP * V_SPLIT_K - 1) // (STEP * V_SPLIT_K)
    lane_k = gl.arange(0, SHRINK_K, layout=gl.SliceLayout(0, gl.SliceLayout(2, A)))
    warp = gl.arange(0, NUM_WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, A)))
    ranks = first_rank + gl.arange(0, SHRINK_R, layout=gl.SliceLayout(0, gl.SliceLayout(1, A)))
    column = k_part * (STEPS * STEP) + lane_k[None, :, None] + warp[:, None, None] * SHRINK_K
    a_ptr = a_address.to(gl.pointer_type(DTYPE))
    offset = ranks[None, None, :].to(gl.int64) * stride_ar + column
    return load_block(a_ptr, offset, ranks[None, None, :] < rank, column, 0, STEP, K, V_SPLIT_K, 1)


@gluon.jit
def load_share(
    share, most_shares, num_items,
    plan_ptr,
    entries_ptr, stride_el,
    K: gl.constexpr, NUM_SLICES: gl.constexpr, V_SPLIT_K: gl.constexpr, TILE_M: gl.constexpr,
    ITEM_M: gl.constexpr, RANK_BLOCKS: gl.constexpr, SHRINK_R: gl.constexpr,
    SHRINK_K: gl.constexpr, X: gl.constexpr, A: gl.constexpr, V: gl.constexpr,
    NUM_WARPS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """All that :func:`finish_share` needs of a share but x, in three rounds of loads."""
    slot, rows, num_rows, k_part, part, first_rank = find_share(
        share, most_shares, num_items,
        plan_ptr,
        NUM_SLICES, V_SPLIT_K, TILE_M, ITEM_M, RANK_BLOCKS, SHRINK_R,
    )  # fmt: skip
    a_address, stride_ar, rank, scaling, x_row, v_row = open_share(
        slot, rows, num_rows, part,
        entries_ptr, stride_el,
        X, V,
    )  # fmt: skip
    a = load_a(
        a_address, stride_ar, k_part, first_rank, rank,
        K, V_SPLIT_K, SHRINK_R, SHRINK_K, A, NUM_WARPS, DTYPE,
    )  # fmt: skip
    return (
        a, a_address, stride_ar, x_row, v_row, num_rows, k_part, part, first_rank, rank, scaling,
    )  # fmt: skip


@gluon.jit
def pack(value, flag):
    """Words of float32 with 16 bits of significand, and the launch's flag in the last 8 bits."""
    bits = value.to(gl.int32, bitcast=True)
    # NaN stays NaN: of its bits the rounding would make another number
    bits = gl.where(value == value, (bits + 0x80) & -0x100, 0x7FC00000)
    return bits | flag


@gluon.jit
def finish_share(
    x_ptr, stride_xm,
    v_ptr, stride_vk, stride_vm, stride_vs, flag,
    a, a_address, stride_ar, x_row, v_row, num_rows, k_part, part, first_rank, rank, scaling,
    K: gl.constexpr, V_SPLIT_K: gl.constexpr, SHRINK_R: gl.constexpr, SHRINK_K: gl.constexpr,
    X: gl.constexpr, A: gl.constexpr, PRODUCT: gl.constexpr, V: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Write a share's scaling * x A^T to its plane of v, with this launch's flag; each warp sums a
    strip of K."""
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
    # in groups of 8, as they are read; past the rank they are zero
    mask = (lane < num_rows)[:, None] & (ranks // 8 * 8 < rank)[None, :]
    gl.store(target, pack(total, flag), mask=mask)


@gluon.jit
def run_shares(
    share, num_shares, stride_share, most_shares, num_items,
    x_ptr, stride_xm,
    plan_ptr,
    entries_ptr, stride_el,
    v_ptr, stride_vk, stride_vm, stride_vs, flag,
    a, a_address, stride_ar, x_row, v_row, num_rows, k_part, part, first_rank, rank, scaling,
    K: gl.constexpr, NUM_SLICES: gl.constexpr, V_SPLIT_K: gl.constexpr, TILE_M: gl.constexpr,
    ITEM_M: gl.constexpr, RANK_BLOCKS: gl.constexpr, SHRINK_R: gl.constexpr,
    SHRINK_K: gl.constexpr, X: gl.constexpr, A: gl.constexpr, PRODUCT: gl.constexpr,
    V: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """Every ``stride_share``-th share from this one on, of which all but x is loaded."""
    while share < num_shares:
        # its ranks may lie past those of the adapter
        if first_rank < rank:
            finish_share(
                x_ptr, stride_xm,
                v_ptr, stride_vk, stride_vm, stride_vs, flag,
                a, a_address, stride_ar, x_row, v_row, num_rows, k_part, part, first_rank, rank,
                scaling,
                K, V_SPLIT_K, SHRINK_R, SHRINK_K, X, A, PRODUCT, V, NUM_WARPS,
            )  # fmt: skip
        share += stride_share
        if share < num_shares:
            (
                a, a_address, stride_ar, x_row, v_row, num_rows, k_part, part, first_rank, rank,
                scaling,
            ) = load_share(
                share, most_shares, num_items,
                plan_ptr,
                entries_ptr, stride_el,
                K, NUM_SLICES, V_SPLIT_K, TILE_M, ITEM_M, RANK_BLOCKS, SHRINK_R, SHRINK_K, X, A, V,
                NUM_WARPS, x_ptr.dtype.element_ty,
            )  # fmt: skip
