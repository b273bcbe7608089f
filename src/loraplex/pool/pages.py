"""Which pages of an arena are free."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class PageAllocator:
    """Hands out pages by number; knows nothing of what lies in them.

    A request is a list of spans: a span of 1 may land anywhere, a span of n needs n consecutive
    pages. So requests of single pages, which is what nearly all adapters are, never see external
    fragmentation.

    Example:
        >>> pages = PageAllocator(6)
        >>> pages.allocate([1, 2]).tolist()
        [0, 4, 5]
        >>> pages.num_free, pages.largest_run()
        (3, 3)
    """

    def __init__(self, num_pages: int) -> None:
        self._free: BoolArray = np.ones(num_pages, dtype=np.bool_)
        self.num_free = num_pages

    @property
    def num_pages(self) -> int:
        """Pages in all, free or not."""
        return len(self._free)

    def copy(self) -> PageAllocator:
        """An independent allocator in the same state, to try a plan on."""
        other = PageAllocator(0)
        other._free, other.num_free = self._free.copy(), self.num_free
        return other

    def grow(self, num_pages: int) -> int:
        """Append free pages; returns the number of the first one."""
        first = self.num_pages
        self._free = np.concatenate([self._free, np.ones(num_pages, dtype=np.bool_)])
        self.num_free += num_pages
        return first

    def allocate(self, spans: Sequence[int]) -> IntArray | None:
        """Take the pages of all spans, in the order of the spans; None if they do not fit."""
        total = sum(spans)
        if total > self.num_free:
            return None
        free = self._free
        if total == len(spans):
            taken = np.flatnonzero(free)[:total]
        else:
            free = free.copy()
            found = _place_spans(free, spans)
            if found is None:
                return None
            taken = found
        free[taken] = False
        self._free = free
        self.num_free -= total
        return taken

    def release(self, pages: IntArray) -> None:
        """Give pages back."""
        assert not self._free[pages].any(), "a page was released twice"
        self._free[pages] = True
        self.num_free += len(pages)

    def largest_run(self) -> int:
        """Length of the longest run of consecutive free pages."""
        _, lengths = _runs(self._free)
        return int(lengths.max(initial=0))

    def free_in(self, first: int, count: int) -> int:
        """Free pages among ``count`` pages from ``first``."""
        return int(np.count_nonzero(self._free[first : first + count]))

    def retire(self, first: int, count: int) -> None:
        """Take a run of free pages out of use (their memory is given up)."""
        assert self._free[first : first + count].all(), "only free pages can be retired"
        self._free[first : first + count] = False
        self.num_free -= count

    def restore(self, first: int, count: int) -> None:
        """Bring retired pages back into use."""
        assert not self._free[first : first + count].any(), "only retired pages can be restored"
        self._free[first : first + count] = True
        self.num_free += count


def coalesce(*columns: IntArray, breaks: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Ranges [start, stop) of positions over which every column counts up by one.

    Args:
        columns: page numbers, one array per arena, all of one length.
        breaks: positions at which a range has to end although the pages go on.
    """
    count = len(columns[0])
    if count == 0:
        return []
    is_cut = np.zeros(count, dtype=np.bool_)
    for column in columns:
        is_cut[1:] |= column[1:] - column[:-1] != 1
    is_cut[[b for b in breaks if 0 < b < count]] = True
    edges = [0, *np.flatnonzero(is_cut).tolist(), count]
    return list(itertools.pairwise(edges))


def _runs(free: BoolArray) -> tuple[IntArray, IntArray]:
    """Starts and lengths of the runs of free pages."""
    steps = np.diff(free.astype(np.int8), prepend=0, append=0)
    starts = np.flatnonzero(steps == 1)
    return starts, np.flatnonzero(steps == -1) - starts


def _place_spans(free: BoolArray, spans: Sequence[int]) -> IntArray | None:
    """Long spans from the upper end of the smallest run that holds them, pages from below."""
    firsts = [0] * len(spans)
    for i in sorted(range(len(spans)), key=lambda i: -spans[i]):
        if spans[i] == 1:
            break
        starts, lengths = _runs(free)
        fitting = np.flatnonzero(lengths >= spans[i])
        if len(fitting) == 0:
            return None
        best = fitting[np.argmin(lengths[fitting])]
        firsts[i] = int(starts[best] + lengths[best] - spans[i])
        free[firsts[i] : firsts[i] + spans[i]] = False
    singles = iter(np.flatnonzero(free).tolist())
    parts = []
    for first, length in zip(firsts, spans, strict=True):
        start = next(singles) if length == 1 else first
        parts.append(np.arange(start, start + length))
    return np.concatenate(parts)
