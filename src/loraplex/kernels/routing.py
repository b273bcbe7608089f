"""Which adapters occur in each tile of rows, and which rows each has, in one launch, unsorted.

The layout of the plan is described in :mod:`loraplex.reference.routing`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_tokens"])
def routing_kernel(
    source_ptr, stride_source,
    indices_ptr,
    places_ptr,
    plan_ptr,
    num_tokens,
    num_adapters,
    TILE_M: tl.constexpr,
    ITEM_M: tl.constexpr,
):  # fmt: skip
    """source [M], any integers -> indices [M], places [M], plan [T, 16 + 4 TILE_M]."""
    # which tile
    tile = tl.program_id(0)
    lane = tl.arange(0, TILE_M)
    row = tile * TILE_M + lane
    in_rows = row < num_tokens
    index = tl.load(source_ptr + row.to(tl.int64) * stride_source, mask=in_rows, other=-1)
    # an index that no check has seen must not become a wild address: such a row is a base row
    index = tl.where((index >= 0) & (index < num_adapters), index, -1).to(tl.int32)

    # the first row of each adapter leads it; leaders are numbered from the top
    is_same = index[:, None] == index[None, :]
    is_earlier = lane[None, :] < lane[:, None]
    earlier = tl.sum((is_same & is_earlier).to(tl.int32), axis=1)
    is_leader = (earlier == 0) & (index >= 0)
    count = tl.sum(is_leader.to(tl.int32), axis=0)
    number = tl.cumsum(is_leader.to(tl.int32), axis=0) - 1
    place = tl.sum(tl.where(is_same & is_leader[None, :], number[None, :], 0), axis=1)
    tl.store(indices_ptr + row, index, mask=in_rows)
    tl.store(places_ptr + row, tl.where(index >= 0, place, -1), mask=in_rows)

    # rows grouped by place; base rows and rows past the end come last
    group = tl.where(index >= 0, place, count)
    is_member = (group[None, :] == lane[:, None]) & in_rows[None, :]
    size = tl.sum(is_member.to(tl.int32), axis=1)
    start = tl.cumsum(size, axis=0) - size
    is_before = (group[None, :] < group[:, None]) & in_rows[None, :]
    group_start = tl.sum(is_before.to(tl.int32), axis=1)
    base = plan_ptr + tile * (16 + 4 * TILE_M)
    tl.store(base + 16 + number, index, mask=is_leader)
    tl.store(base + 16 + TILE_M + group_start + earlier, row, mask=in_rows)

    # items: each group in pieces of ITEM_M rows, with the group's slot
    leads = is_leader[None, :] & (number[None, :] == lane[:, None])
    slot = tl.sum(tl.where(leads, index[None, :] + 1, 0), axis=1) - 1
    pieces = (size + ITEM_M - 1) // ITEM_M
    first_item = tl.cumsum(pieces, axis=0) - pieces
    for piece in tl.static_range((TILE_M + ITEM_M - 1) // ITEM_M):
        rest = tl.minimum(size - piece * ITEM_M, ITEM_M)
        packed = ((start + piece * ITEM_M) << 8) | rest
        item_ptr = base + 16 + 2 * TILE_M + first_item + piece
        tl.store(item_ptr, packed, mask=piece < pieces)
        tl.store(item_ptr + TILE_M, slot, mask=piece < pieces)
    tl.store(base, count)
    tl.store(base + 1, tl.sum(pieces, axis=0))


def launch_routing(
    source: Tensor,
    indices: Tensor,
    places: Tensor,
    plan: Tensor,
    num_adapters: int,
    *,
    tile_m: int,
    item_m: int,
) -> None:
    """Fill the routing buffers of ``source.shape[0]`` rows; tiles past them keep what they had."""
    num_tokens = source.shape[0]
    routing_kernel[(-(-num_tokens // tile_m),)](
        source, source.stride(0),
        indices,
        places,
        plan,
        num_tokens,
        num_adapters,
        TILE_M=tile_m,
        ITEM_M=item_m,
        num_warps=4 if tile_m <= 64 else 16,
    )  # fmt: skip
