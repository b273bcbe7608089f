"""Which adapters occur in each tile of rows, found in one launch without a sort."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def routing_kernel(
    source_ptr, stride_source,
    indices_ptr,
    places_ptr,
    slots_ptr,
    counts_ptr,
    num_tokens,
    num_adapters,
    TILE_M: tl.constexpr,
):  # fmt: skip
    """``slots[t]`` = distinct adapters of tile t by first appearance; ``places[m]`` there.

    source [M] any integer -> indices [M], places [M], slots [T, TILE_M], counts [T].
    """
    # which tile
    tile = tl.program_id(0)
    lane = tl.arange(0, TILE_M)
    row = tile * TILE_M + lane
    index = tl.load(source_ptr + row.to(tl.int64) * stride_source, mask=row < num_tokens, other=-1)
    index = index.to(tl.int32)
    # an index that no check has seen must not become a wild address: such a row is a base row
    index = tl.where((index >= 0) & (index < num_adapters), index, -1)

    # the first row of each adapter leads it; leaders are numbered from the top
    same = (index[:, None] == index[None, :]) & (lane[None, :] < lane[:, None])
    is_leader = (tl.sum(same.to(tl.int32), axis=1) == 0) & (index >= 0)
    number = tl.cumsum(is_leader.to(tl.int32), axis=0) - 1
    leads = (index[:, None] == index[None, :]) & is_leader[None, :]
    place = tl.sum(tl.where(leads, number[None, :], 0), axis=1)
    place = tl.where(index >= 0, place, -1)

    tl.store(indices_ptr + row, index, mask=row < num_tokens)
    tl.store(places_ptr + row, place, mask=row < num_tokens)
    tl.store(slots_ptr + tile * TILE_M + number, index, mask=is_leader)
    tl.store(counts_ptr + tile, tl.sum(is_leader.to(tl.int32), axis=0))


def launch_routing(source, indices, places, slots, counts, num_adapters, *, tile_m):
    """Fill the routing buffers of ``source.shape[0]`` rows; tiles past them keep what they had."""
    num_tokens = source.shape[0]
    routing_kernel[(triton.cdiv(num_tokens, tile_m),)](
        source, source.stride(0),
        indices,
        places,
        slots,
        counts,
        num_tokens,
        num_adapters,
        TILE_M=tile_m,
        num_warps=4,
    )  # fmt: skip
