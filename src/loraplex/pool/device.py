"""The device tier: one arena of pages, the metadata of all tables, and who is evicted."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from loraplex.adapters import LayerShape
from loraplex.errors import PoolError, PoolFullError
from loraplex.pool.host import HostTier
from loraplex.pool.layout import ALIGNMENT
from loraplex.pool.pages import PageAllocator
from loraplex.pool.record import Placement, Record
from loraplex.pool.stats import Counters
from loraplex.pool.timeline import Mark, Timeline
from loraplex.table import ENTRY_FIELDS

COPY_GROUPS = 8
"""Parts in which an adapter arrives; its first layers are usable after the first of them."""


class DeviceTier:
    """Device memory that is allocated once. Every method expects the pool's lock to be held.

    Safety rests on one rule: the arena and the entries are written on the copy stream alone, and
    the copy stream waits for the last use of an adapter before anything of it is overwritten.

    Attributes:
        arena: uint8 [num_pages, page_bytes].
        entries: int64 [L, layers, S_max, 8], the records of all tables; one row per slot, so that
            one copy publishes an adapter in all layers.
        idle: adapters that may be evicted, least recently used first.
        allocator: free pages. free_slots: free slots.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerShape],
        *,
        num_slots: int,
        num_pages: int,
        page_bytes: int,
        device: torch.device,
        timeline: Timeline,
        counters: Counters,
    ) -> None:
        widest = max(len(shape.slices) for shape in layers.values())
        shape = (num_slots, len(layers), widest, ENTRY_FIELDS)
        self.arena = _aligned_bytes(num_pages * page_bytes, device).view(num_pages, page_bytes)
        self.entries = torch.zeros(shape, dtype=torch.int64, device=device)
        self.allocator = PageAllocator(num_pages)
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.idle: OrderedDict[Record, None] = OrderedDict()
        self.resident: dict[Record, None] = {}
        self._timeline = timeline
        self._counters = counters
        self._address = self.arena.data_ptr()
        self._unmeasured: deque[tuple[Mark, Mark]] = deque()

    def check_room(self, missing: Sequence[Record]) -> None:
        """Refuse what does not fit even if everything idle is evicted; changes nothing.

        Raises:
            PoolFullError: it does not.
        """
        if not self._fits(missing, list(self.idle)):
            raise PoolFullError(self._why_full(missing))

    def make_room(self, missing: Sequence[Record]) -> None:
        """Evict as few of the least recently used adapters as let all of ``missing`` in.

        Raises:
            PoolFullError: what is in use leaves too little; nothing was evicted then.
        """
        victims: list[Record] = []
        candidates = iter(self.idle)
        while not self._fits(missing, victims):
            victim = next(candidates, None)
            if victim is None:
                raise PoolFullError(self._why_full(missing))
            victims.append(victim)
        for victim in victims:
            self.evict(victim)
            self._counters.evictions += 1

    def load(self, record: Record, host: HostTier) -> None:
        """Start copying an adapter from host memory; :meth:`make_room` made sure that it fits.

        The entries go first, then the pages in the order of the layers. If a copy cannot be
        issued, slot and pages are free again and the adapter is as it was.
        """
        assert record.host is not None
        manifest, timeline = record.manifest, self._timeline
        pages = self.allocator.allocate(manifest.layout.spans)
        assert pages is not None, "make_room comes before load"
        slot = self.free_slots.pop()
        group = -(-len(pages) // COPY_GROUPS) or 1
        arrivals: list[Mark] = []
        try:
            with timeline.copying():
                start = timeline.mark()
                entries = torch.from_numpy(manifest.entries(self._address, pages))
                timeline.copy_(self.entries[slot], timeline.stage(entries))
                arrivals.append(timeline.mark())
                breaks = list(range(group, len(pages), group))
                for first, stop in host.runs(record.host, pages, breaks=breaks):
                    target = self.arena[int(pages[first]) : int(pages[first]) + stop - first]
                    timeline.copy_(target, host.view(int(record.host[first]), stop - first))
                    if stop % group == 0 or stop == len(pages):
                        arrivals.append(timeline.mark())
        except BaseException:
            self.allocator.release(pages)
            self.free_slots.append(slot)
            with contextlib.suppress(RuntimeError), timeline.copying():
                record.last_copy = timeline.mark()
                timeline.clear_(self.entries[slot])
            raise
        record.place = Placement(slot, pages, start, arrivals, manifest.layer_pages // group + 1)
        record.last_copy = arrivals[-1]
        record.last_use.clear()
        self.resident[record] = None
        self._unmeasured.append((start, arrivals[-1]))
        self._counters.loads += 1
        self._counters.loaded_bytes += record.num_bytes

    def evict(self, record: Record) -> None:
        """Take an adapter off the device: its entries are cleared after its last use."""
        place, timeline = record.place, self._timeline
        assert place is not None
        for mark in record.last_use.values():
            timeline.follow(mark)
        with timeline.copying():
            timeline.clear_(self.entries[place.slot])
        self.idle.pop(record, None)
        del self.resident[record]
        record.place = None
        self.allocator.release(place.pages)
        self.free_slots.append(place.slot)

    def check_ready(self, record: Record) -> bool:
        """Whether all of a resident adapter has arrived; asks the device only until it has."""
        place = record.place
        assert place is not None
        if not place.is_ready:
            place.is_ready = self._timeline.is_reached(place.arrivals[-1])
        return place.is_ready

    def measure(self) -> None:
        """Add the copies that ended since the last call to the load latencies."""
        while self._unmeasured and self._timeline.is_reached(self._unmeasured[0][1]):
            start, end = self._unmeasured.popleft()
            self._counters.load_seconds.add(self._timeline.seconds(start, end))

    def _fits(self, missing: Sequence[Record], victims: Sequence[Record]) -> bool:
        if len(missing) > len(self.free_slots) + len(victims):
            return False
        freed = sum(v.num_pages for v in victims)
        if sum(r.num_pages for r in missing) > self.allocator.num_free + freed:
            return False
        if all(len(r.manifest.layout.spans) == r.num_pages for r in missing):
            return True  # single pages go anywhere
        trial = self.allocator.copy()
        for victim in victims:
            assert victim.place is not None
            trial.release(victim.place.pages)
        return all(trial.allocate(r.manifest.layout.spans) is not None for r in missing)

    def _why_full(self, missing: Sequence[Record]) -> str:
        page_bytes = self.arena.shape[1]
        in_use = [r for r in self.resident if r not in self.idle]
        held = sum(r.num_pages for r in in_use)
        wanted = sum(r.num_pages for r in missing)
        return (
            f"cannot make {len(missing)} more adapters resident: they need {wanted * page_bytes} "
            f"bytes, and {len(in_use)} adapters in use hold {held * page_bytes} of "
            f"{self.arena.numel()} bytes and {len(in_use)} of {self.entries.shape[0]} slots"
        )


def _aligned_bytes(count: int, device: torch.device) -> Tensor:
    """Uninitialised memory that starts on a cache line."""
    try:
        memory = torch.empty(count + ALIGNMENT, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise PoolError(
            f"{device} has no memory for an arena of {count} bytes (device_bytes): {error!s:.200}"
        ) from error
    skip = -memory.data_ptr() % ALIGNMENT
    return memory[skip : skip + count]
