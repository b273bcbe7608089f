"""The host tier: pages in (pinned) host memory, in segments that are added as they are needed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from loraplex.pool.pages import IntArray, PageAllocator, coalesce
from loraplex.pool.timeline import Mark, Timeline

LARGEST_SEGMENT = 64 << 20


class HostTier:
    """Pages of host memory within a budget.

    Memory comes in segments, which are never given back by themselves (unpinning stalls the
    device): a pool that loads and unloads for days stays as large as its busiest moment, and
    :meth:`trim` returns what is empty. Every method expects the pool's lock to be held, except
    :meth:`new_segment`, and those that only touch pages which the caller holds: :meth:`runs`,
    :meth:`view`, :meth:`views`, :meth:`write`, :meth:`read`.

    Args:
        page_bytes: size of a page.
        budget: bytes, None for no limit.
        timeline: of the device that is copied to; gives memory, says when pages may be reused.
        segment_bytes: how much to add at a time, at most ``LARGEST_SEGMENT``.
    """

    def __init__(
        self,
        page_bytes: int,
        budget: int | None,
        timeline: Timeline,
        *,
        segment_bytes: int,
    ) -> None:
        self.page_bytes = page_bytes
        self.budget_pages = None if budget is None else budget // page_bytes
        self._segment_pages = max(1, min(segment_bytes, LARGEST_SEGMENT) // page_bytes)
        self._timeline = timeline
        self._segments: list[Tensor | None] = []
        self._allocator = PageAllocator(0)
        self._leaving: list[tuple[Mark, IntArray]] = []  # freed, but still being copied from

    @property
    def num_reserved(self) -> int:
        """Pages of memory that is held now."""
        return sum(len(segment) for segment in self._segments if segment is not None)

    @property
    def num_used(self) -> int:
        """Pages that hold an adapter (or still feed a copy)."""
        self._reap()
        return self.num_reserved - self._allocator.num_free

    def allocate(self, count: int) -> IntArray | None:
        """Take pages that are there already, wherever they lie; None if there are too few."""
        self._reap()
        return self._allocator.allocate([1] * count)

    @property
    def num_free(self) -> int:
        """Pages that can be had without growing."""
        self._reap()
        return self._allocator.num_free

    def release(self, pages: IntArray, last_copy: Mark | None = None) -> None:
        """Give pages back; they are reused once the last copy from them is done."""
        if last_copy is not None and not self._timeline.is_reached(last_copy):
            self._leaving.append((last_copy, pages))
        else:
            self._allocator.release(pages)

    def leaving(self) -> Mark | None:
        """The mark after which the next pages become free by themselves."""
        return self._leaving[0][0] if self._leaving else None

    def growth(self) -> int:
        """Pages of the next segment; 0 if the budget is used up."""
        if self.budget_pages is None:
            return self._segment_pages
        first = self._next_segment() * self._segment_pages
        return min(self._segment_pages, self.budget_pages - first)

    def can_ever_hold(self, count: int) -> bool:
        """Whether an empty tier would have room for that many pages."""
        return self.budget_pages is None or count <= self.budget_pages

    def new_segment(self, count: int) -> Tensor:
        """Memory for a segment of :meth:`growth` pages; slow if pinned, so not under the lock."""
        memory = self._timeline.host_memory(count * self.page_bytes)
        return memory.view(count, self.page_bytes)

    def attach(self, segment: Tensor) -> None:
        """Take a segment into use."""
        index = self._next_segment()
        if index < len(self._segments):
            self._segments[index] = segment
            self._allocator.restore(index * self._segment_pages, len(segment))
        else:
            self._segments.append(segment)
            self._allocator.grow(len(segment))

    def _next_segment(self) -> int:
        return self._segments.index(None) if None in self._segments else len(self._segments)

    def trim(self) -> int:
        """Drop empty segments; returns their bytes."""
        self._reap()
        dropped = 0
        for index, segment in enumerate(self._segments):
            first = index * self._segment_pages
            if segment is not None and self._allocator.free_in(first, len(segment)) == len(segment):
                self._allocator.retire(first, len(segment))
                self._segments[index] = None
                dropped += len(segment)
        return dropped * self.page_bytes

    def view(self, first: int, count: int) -> Tensor:
        """uint8 [count, page_bytes], consecutive pages of one segment."""
        index, start = divmod(first, self._segment_pages)
        segment = self._segments[index]
        assert segment is not None
        assert start + count <= self._segment_pages, "a view ends with its segment"
        return segment.narrow(0, start, count)

    def runs(self, pages: IntArray, *others: IntArray, breaks: list[int]) -> list[tuple[int, int]]:
        """Ranges of positions that are consecutive here and in the other arenas."""
        segments = pages // self._segment_pages
        crossings = (np.flatnonzero(segments[1:] != segments[:-1]) + 1).tolist()
        return coalesce(pages, *others, breaks=[*breaks, *crossings])

    def views(self, pages: IntArray) -> list[Tensor]:
        """The pages as few tensors as possible, in order."""
        return [
            self.view(int(pages[start]), stop - start)
            for start, stop in self.runs(pages, breaks=[])
        ]

    def write(self, pages: IntArray, image: Tensor) -> None:
        """Fill pages from uint8 [num_pages, page_bytes]."""
        start = 0
        for view in self.views(pages):
            view.copy_(image[start : start + len(view)])
            start += len(view)

    def read(self, pages: IntArray) -> Tensor:
        """A private copy of pages."""
        views = self.views(pages)
        return torch.cat(views) if views else torch.empty(0, self.page_bytes, dtype=torch.uint8)

    def _reap(self) -> None:
        if self._leaving:
            waiting = []
            for mark, pages in self._leaving:
                if self._timeline.is_reached(mark):
                    self._allocator.release(pages)
                else:
                    waiting.append((mark, pages))
            self._leaving = waiting
