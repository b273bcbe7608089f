"""Pages and layouts: nothing overlaps, everything is aligned, waste is bounded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters import LayerShape
from loraplex.pool.layout import (
    ALIGNMENT,
    choose_page_bytes,
    lay_out,
    matrix_sizes,
    padded_rank,
    row_stride,
)
from loraplex.pool.pages import PageAllocator, coalesce

LLAMA_8B = {
    f"layers.{i}.{name}": shape
    for i in range(32)
    for name, shape in {
        "qkv": LayerShape(4096, (4096, 1024, 1024), ("q", "k", "v")),
        "o": LayerShape.plain(4096, 4096),
        "gate_up": LayerShape(4096, (14336, 14336), ("gate", "up")),
        "down": LayerShape.plain(14336, 4096),
    }.items()
}


@given(st.lists(st.integers(1, 40_000), max_size=60), st.sampled_from([1024, 4096, 16384]))
def test_pieces_are_aligned_and_apart(sizes: list[int], page_bytes: int) -> None:
    layout = lay_out(tuple(sizes), page_bytes)
    starts = layout.pages * page_bytes + layout.offsets
    assert not (starts % ALIGNMENT).any()
    assert layout.live_bytes == sum(sizes)
    span_of = np.repeat(np.arange(len(layout.spans)), layout.spans)
    used = np.zeros(layout.num_bytes, dtype=np.int8)
    for start, size, last in zip(starts, sizes, layout.last_pages, strict=True):
        used[start : start + size] += 1
        # contiguous on the device: a piece never leaves its span
        assert last == (start + size - 1) // page_bytes
        assert span_of[start // page_bytes] == span_of[last]
    assert used.max(initial=0) <= 1


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=60))
def test_at_most_one_span_is_half_empty(sizes: list[int]) -> None:
    page_bytes = 8192
    layout = lay_out(tuple(sizes), page_bytes)
    span_of = np.repeat(np.arange(len(layout.spans)), layout.spans)
    filled = np.zeros(len(layout.spans), dtype=np.int64)
    steps = -(-np.array(sizes) // ALIGNMENT) * ALIGNMENT
    np.add.at(filled, span_of[layout.pages], steps)
    half_empty = filled * 2 <= np.array(layout.spans) * page_bytes
    assert half_empty.sum() <= 1


@given(st.lists(st.integers(1, 2048), min_size=1, max_size=80))
def test_small_pieces_fill_all_pages_but_the_last(sizes: list[int]) -> None:
    layout = lay_out(tuple(sizes), 8192)
    filled = np.zeros(len(layout.spans), dtype=np.int64)
    np.add.at(filled, layout.pages, -(-np.array(sizes) // ALIGNMENT) * ALIGNMENT)
    assert (filled[:-1] > 8192 * 3 // 4).all()


@pytest.mark.parametrize(("rank", "most"), [(8, 0.0), (16, 0.03), (32, 0.03), (64, 0.06)])
def test_llama_adapters_take_the_bytes_of_their_rank(rank: int, most: float) -> None:
    page_bytes = choose_page_bytes(LLAMA_8B, 2, (8, 16, 32, 64))
    sizes = matrix_sizes(LLAMA_8B.values(), rank, 2)
    assert sum(sizes) == 2 * rank * sum(
        shape.in_features * len(shape.slices) + shape.out_features for shape in LLAMA_8B.values()
    )
    assert lay_out(sizes, page_bytes).num_bytes / sum(sizes) - 1 <= most
    assert page_bytes == 2 << 20  # long copies


def test_ranks_and_rows_are_stored_as_multiples_of_eight() -> None:
    assert [padded_rank(rank) for rank in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert [row_stride(k) for k in (1, 64, 65)] == [8, 64, 72]


def test_no_pieces_take_no_pages() -> None:
    layout = lay_out((), 4096)
    assert (layout.num_pages, layout.live_bytes) == (0, 0)


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), max_size=12), st.data())
def test_allocator_against_a_set(requests: list[list[int]], data: st.DataObject) -> None:
    allocator, taken = PageAllocator(24), []
    for spans in requests:
        if taken and data.draw(st.booleans()):
            allocator.release(taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        pages = allocator.allocate(spans)
        if pages is None:
            continue
        start = 0
        for length in spans:
            span = pages[start : start + length]
            assert (np.diff(span) == 1).all()
            start += length
        taken.append(pages)
        owned = [page for pages in taken for page in pages.tolist()]
        assert len(set(owned)) == len(owned)
        assert allocator.num_free == 24 - len(owned)


def test_single_pages_fit_whenever_enough_are_free() -> None:
    allocator = PageAllocator(6)
    pages = allocator.allocate([1] * 6)
    assert pages is not None
    allocator.release(pages[[1, 3, 5]])
    assert allocator.largest_run() == 1
    assert allocator.allocate([2]) is None
    assert allocator.num_free == 3
    scattered = allocator.allocate([1, 1, 1])
    assert scattered is not None
    assert scattered.tolist() == [1, 3, 5]


def test_a_page_is_not_released_twice() -> None:
    allocator = PageAllocator(2)
    pages = allocator.allocate([1])
    assert pages is not None
    allocator.release(pages)
    with pytest.raises(AssertionError, match="twice"):
        allocator.release(pages)


def test_coalesce_breaks_where_any_column_jumps() -> None:
    first, second = np.array([4, 5, 6, 9]), np.array([0, 1, 5, 6])
    assert coalesce(first, second) == [(0, 2), (2, 3), (3, 4)]
    assert coalesce(first, breaks=[2]) == [(0, 2), (2, 3), (3, 4)]
    assert coalesce(np.array([], dtype=np.int64)) == []
