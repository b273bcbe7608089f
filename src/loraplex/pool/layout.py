"""How the matrices of one adapter are laid into pages, and which page size suits a model."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loraplex.adapters import LayerShape
from loraplex.pool.pages import IntArray

ALIGNMENT = 128
"""Bytes: a cache line, eight times what the kernels' 16-byte loads ask for."""

RANK_MULTIPLE = 8
"""Ranks and row strides are stored as multiples of this, filled up with zeros."""

SMALLEST_PAGE, LARGEST_PAGE = 4 << 10, 2 << 20

MOST_WASTE = 1 / 16
"""Share of an adapter's bytes that its pages may add, for adapters of all layers."""


@dataclass(frozen=True)
class Layout:
    """Where each piece of an adapter lies in its pages; the same in every tier.

    Attributes:
        page_bytes: size of a page.
        spans: runs of pages that have to be consecutive on the device; 1 for a plain page.
        pages: [pieces] page, counted within the adapter, in which a piece starts.
        offsets: [pieces] byte within that page.
        last_pages: [pieces] page in which a piece ends.
        live_bytes: sum of the pieces.
    """

    page_bytes: int
    spans: tuple[int, ...]
    pages: IntArray
    offsets: IntArray
    last_pages: IntArray
    live_bytes: int

    @functools.cached_property
    def num_pages(self) -> int:
        """Pages in all."""
        return sum(self.spans)

    @property
    def num_bytes(self) -> int:
        """Bytes of those pages."""
        return self.num_pages * self.page_bytes


@functools.lru_cache(maxsize=128)
def lay_out(sizes: tuple[int, ...], page_bytes: int) -> Layout:
    """First fit, in order: each piece goes into the first span that has room for it.

    Because later pieces only ever go into spans already opened or into a new one at the end,
    an adapter whose pages arrive in order has its layers ready in order.

    A piece longer than a page opens a span of several pages. At most one span is filled to half
    or less (a later one would have gone into it), and pieces of at most 1/k of a page fill every
    page but the last to more than 1 - 1/k.

    Example:
        >>> layout = lay_out((3000, 3000, 1000, 9000), page_bytes=4096)
        >>> layout.spans, layout.pages.tolist(), layout.offsets.tolist()
        ((1, 1, 3), [0, 1, 0, 2], [0, 0, 3072, 0])
    """
    steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    smallest = min(steps, default=0)
    spans: list[int] = []
    first_pages: list[int] = []
    starts: list[tuple[int, int]] = []  # (span, byte within the span) of each piece
    room: dict[int, int] = {}  # spans that may still take something, in order
    for step in steps:
        span = next((s for s, left in room.items() if left >= step), None)
        if span is None:
            span = len(spans)
            first_pages.append(first_pages[-1] + spans[-1] if spans else 0)
            spans.append(max(1, -(-step // page_bytes)))
            room[span] = spans[span] * page_bytes
        starts.append((span, spans[span] * page_bytes - room[span]))
        room[span] -= step
        if room[span] < smallest:
            del room[span]
    places = np.array(
        [first_pages[span] * page_bytes + byte for span, byte in starts], dtype=np.int64
    )
    ends = places + np.maximum(np.array(sizes, dtype=np.int64), 1) - 1
    return Layout(
        page_bytes=page_bytes,
        spans=tuple(spans),
        pages=places // page_bytes,
        offsets=places % page_bytes,
        last_pages=ends // page_bytes,
        live_bytes=sum(sizes),
    )


def padded_rank(rank: int) -> int:
    """The rank under which an adapter is stored."""
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def row_stride(in_features: int) -> int:
    """Elements from one row of A to the next."""
    return -(-in_features // RANK_MULTIPLE) * RANK_MULTIPLE


def matrix_sizes(layers: Iterable[LayerShape], rank: int, element_size: int) -> tuple[int, ...]:
    """Bytes of every A and B of an adapter that has one rank in all slices of all layers."""
    stored = padded_rank(rank) * element_size
    return tuple(
        size
        for shape in layers
        for width in shape.slices
        for size in (stored * row_stride(shape.in_features), stored * width)
    )


def adapter_bytes(
    layers: Mapping[str, LayerShape], rank: int, element_size: int, page_bytes: int
) -> int:
    """Bytes of the pages of an adapter that has one rank in all slices of all layers."""
    return lay_out(matrix_sizes(layers.values(), rank, element_size), page_bytes).num_bytes


def choose_page_bytes(
    layers: Mapping[str, LayerShape], element_size: int, ranks: Sequence[int]
) -> int:
    """The largest power of two that wastes at most ``MOST_WASTE`` on adapters of these ranks.

    Large pages make for few, long copies. If no page is that good, the least wasteful one.
    """
    waste: dict[int, float] = {}
    page_bytes = LARGEST_PAGE
    while page_bytes >= SMALLEST_PAGE:
        sizes = [matrix_sizes(layers.values(), rank, element_size) for rank in ranks]
        used = [lay_out(pieces, page_bytes).num_bytes for pieces in sizes]
        waste[page_bytes] = max(u / sum(s) - 1.0 for u, s in zip(used, sizes, strict=True))
        if waste[page_bytes] <= MOST_WASTE:
            return page_bytes
        page_bytes //= 2
    return min(waste, key=lambda page: waste[page])
