"""The device tier: one arena of pages, the metadata of all tables, and who is evicted."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from loraplex.adapters import LayerShape
from loraplex.errors import PoolError, PoolFullError
from loraplex.pool.host import HostTier
from loraplex.pool.layout import ALIGNMENT
from loraplex.pool.pages import PageAllocator
from loraplex.pool.record import Placement, Record, Room
from loraplex.pool.stats import Counters
from loraplex.pool.timeline import Mark, Timeline
from loraplex.table import ENTRY_FIELDS

COPY_GROUPS = 8
"""Parts in which an adapter arrives; its first layers are usable after the first of them."""


class DeviceTier:
    """Device memory that is allocated once. Methods expect the pool's lock, but for :meth:`issue`.

    Safety rests on one rule: the arena and the entries are written on the copy stream alone, and
    the copy stream waits for the last use of an adapter before anything of it is overwritten.

    Attributes:
        arena: uint8 [num_pages, page_bytes].
        entries: int64 [L, layers, S_max, 8], the records of all tables; one row per slot, so that
            one copy publishes an adapter in all layers.
        idle: adapters that may be evicted, least recently used first.
        resident: adapters that have a slot and pages, loading ones among them.
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
        self.entries = _entries(shape, device)
        self.allocator = PageAllocator(num_pages)
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.idle: OrderedDict[Record, None] = OrderedDict()
        self.resident: dict[Record, None] = {}
        self._timeline = timeline
        self._counters = counters
        self._address = self.arena.data_ptr()
        self._unmeasured: deque[tuple[Mark, Mark]] = deque()

    def check_room(self, missing: Sequence[Record], staying: Collection[Record]) -> bool:
        """Whether ``missing`` fits, if need be in place of all that is idle but for ``staying``.

        Returns:
            False if it will only when other calls have ended that load adapters.

        Raises:
            PoolFullError: leases and pins leave too little, whatever else ends.
        """
        if self._fits(missing, [r for r in self.idle if r not in staying]):
            return True
        others = [r for r in self.resident if r not in staying]
        if not self._fits(missing, [r for r in others if r.users == 0 and not r.is_pinned]):
            raise PoolFullError(self._why_full(missing, staying))
        return False

    def make_room(self, missing: Sequence[Record], staying: Collection[Record]) -> None:
        """Evict as few of the least recently used adapters as let all of ``missing`` in.

        Expects that :meth:`check_room` said yes.
        """
        victims: list[Record] = []
        candidates = (r for r in self.idle if r not in staying)
        while not self._fits(missing, victims):
            victims.append(next(candidates))
        for victim in victims:
            self.evict(victim)
            self._counters.evictions += 1

    def reserve(self, record: Record) -> Room:
        """Set slot and pages aside for an adapter; :meth:`make_room` made sure that it fits.

        Until :meth:`publish` or :meth:`abandon` the record is loading.
        """
        pages = self.allocator.allocate(record.manifest.layout.spans)
        assert pages is not None, "make_room comes before reserve"
        self.resident[record] = None
        record.room = Room(self.free_slots.pop(), pages)
        return record.room

    def issue(self, record: Record, room: Room, host: HostTier) -> Placement:
        """Start copying an adapter from host pages that the caller holds; needs no lock.

        The entries go first, then the pages in the order of the layers. Room that is reserved is
        nobody else's, and what it held before was ordered on the copy stream when it left: so
        copies of several threads may mix, and nothing here has to be kept from changing.
        """
        assert record.host is not None
        manifest, timeline = record.manifest, self._timeline
        pages, host_pages = room.pages.tolist(), record.host.tolist()
        group = -(-len(pages) // COPY_GROUPS) or 1
        breaks = list(range(group, len(pages), group))
        runs = host.runs(record.host, room.pages, breaks=breaks)
        entries = torch.from_numpy(manifest.entries(self._address, room.pages))
        arrivals: list[Mark] = []
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        with timeline.copying():
            start = timeline.mark(is_timed=True)
            timeline.copy_([self.entries[room.slot]], [timeline.stage(entries)])
            arrivals.append(timeline.mark(is_timed=not pages))
            for first, stop in runs:
                targets.append(self.arena.narrow(0, pages[first], stop - first))
                sources.append(host.view(host_pages[first], stop - first))
                if stop % group == 0 or stop == len(pages):
                    timeline.copy_(targets, sources)
                    arrivals.append(timeline.mark(is_timed=stop == len(pages)))
                    targets, sources = [], []
        last_arrivals = manifest.layer_pages // group + 1
        return Placement(room.slot, room.pages, start, arrivals, last_arrivals)

    def publish(self, record: Record, place: Placement) -> None:
        """Let everybody see an adapter whose copies are all issued."""
        record.room = None
        record.place = place
        record.last_copy = place.arrivals[-1]
        record.last_use.clear()
        self._unmeasured.append((place.start, place.arrivals[-1]))
        self._counters.loads += 1
        self._counters.loaded_bytes += record.num_bytes

    def abandon(self, record: Record, room: Room) -> None:
        """Undo :meth:`reserve`: slot and pages are free again and the adapter is as it was."""
        record.room = None
        del self.resident[record]
        self.allocator.release(room.pages)
        self.free_slots.append(room.slot)
        with contextlib.suppress(RuntimeError), self._timeline.copying():
            record.last_copy = self._timeline.mark()
            self._timeline.clear_(self.entries[room.slot])

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
            place = victim.place or victim.room
            assert place is not None
            trial.release(place.pages)
        return all(trial.allocate(r.manifest.layout.spans) is not None for r in missing)

    def _why_full(self, missing: Sequence[Record], staying: Collection[Record]) -> str:
        page_bytes = self.arena.shape[1]
        in_use = [r for r in self.resident if r not in self.idle or r in staying]
        held = sum(r.num_pages for r in in_use)
        wanted = sum(r.num_pages for r in missing)
        return (
            f"cannot make {len(missing)} more adapters resident: they need {wanted * page_bytes} "
            f"bytes, and {len(in_use)} adapters in use hold {held * page_bytes} of "
            f"{self.arena.numel()} bytes and {len(in_use)} of {self.entries.shape[0]} slots"
        )


def _entries(shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
    try:
        return torch.zeros(shape, dtype=torch.int64, device=device)
    except RuntimeError as error:
        raise PoolError(
            f"{device} has no memory for the tables of {shape[0]} slots (max_adapters), "
            f"{8 * math.prod(shape)} bytes: {error!s:.200}"
        ) from error


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
