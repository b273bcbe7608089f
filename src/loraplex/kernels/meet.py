"""How programs of one launch wait for each other, and how the parts of a tile come together.

Data first, then a barrier over the program's warps, then one thread tells with release order; who
waits looks with acquire order. Values are never added by atomics: two runs give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tell(counter_ptr):
    """Add one to a counter once everything that this program has stored can be seen."""
    # every warp has stored before one thread tells
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@triton.jit
def wait_for_all(counters_ptr, count, num_waiting):
    """Return once ``count`` programs have added one to the first counter.

    All ``num_waiting`` programs that wait for it have to come by: the last one sets both counters
    back to zero, when nobody can be polling any more, so that the next launch finds them as this
    one did.
    """
    while tl.atomic_add(counters_ptr, 0, sem="acquire", scope="gpu") < count:
        pass
    if tl.atomic_add(counters_ptr + 1, 1, sem="relaxed", scope="gpu") == num_waiting - 1:
        tl.store(counters_ptr, 0)
        tl.store(counters_ptr + 1, 0)


@triton.jit
def leave_part(acc, plane_ptr, arrivals_ptr):
    """Write one part of a tile to its plane and tell so."""
    HEIGHT: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1]
    inner = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(plane_ptr + inner, acc)
    tell(arrivals_ptr)


@triton.jit
def gather_parts(acc, plane_ptr, stride_plane, arrivals_ptr, COUNT: tl.constexpr):
    """acc plus the other parts of its tile, in a fixed order, once they all are there."""
    HEIGHT: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1]
    inner = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    while tl.atomic_add(arrivals_ptr, 0, sem="acquire", scope="gpu") < COUNT:
        pass
    for part in tl.static_range(COUNT):
        acc += tl.load(plane_ptr + part * stride_plane + inner)
    # nobody else looks at it: back to zero, for the next launch
    tl.store(arrivals_ptr, 0)
    return acc


@triton.jit
def meet(
    acc,
    planes_ptr,
    arrivals_ptr,
    number,
    num_tiles,
    split,
    PARTS: tl.constexpr,
):
    """The sum of a tile's parts in a fixed order, and whether this program is the last to arrive.

    The others' sum means nothing. planes [PARTS, num_tiles, ...] float32; arrivals [num_tiles],
    zero before.
    """
    HEIGHT: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1]
    inner = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    stride_plane = num_tiles.to(tl.int64) * (HEIGHT * WIDTH)
    plane = planes_ptr + number.to(tl.int64) * (HEIGHT * WIDTH) + inner
    tl.store(plane + split * stride_plane, acc)
    # every warp has stored before one thread tells
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + number, 1, sem="acq_rel", scope="gpu")
    is_last = arrived == PARTS - 1
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for part in tl.static_range(PARTS):
        # its own part is still here
        other = tl.load(plane, mask=is_last & (split != part), other=0.0)
        total += tl.where(split == part, acc, other)
        plane += stride_plane
    return total, is_last


@triton.jit
def leave_half(acc, planes_ptr, counter_ptr, half):
    """Write half a tile's sum to its plane; whether the other one lies there already.

    planes [2, ...] float32; the counter is zero before.
    """
    HEIGHT: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1]
    inner = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(planes_ptr + half * (HEIGHT * WIDTH) + inner, acc)
    # every warp has stored before one thread tells
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == 1


@triton.jit
def add_halves(
    planes_ptr,
    first_column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
):
    """The sum [BLOCK_M, WIDTH] of some columns of both halves, which lie transposed if swapped."""
    row = tl.arange(0, BLOCK_M)[:, None]
    column = first_column + tl.arange(0, WIDTH)[None, :]
    inner = column * BLOCK_M + row if IS_SWAPPED else row * BLOCK_N + column
    return tl.load(planes_ptr + inner) + tl.load(planes_ptr + BLOCK_M * BLOCK_N + inner)
