"""The adapters of a pool by name, and their way between the tiers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

from loraplex.errors import AdapterExistsError, PoolError, PoolFullError, UnknownAdapterError
from loraplex.pool.backing import Backing
from loraplex.pool.device import DeviceTier
from loraplex.pool.pages import IntArray
from loraplex.pool.record import Record, Room
from loraplex.pool.stats import Counters
from loraplex.pool.timeline import Mark, Timeline


class Roster:
    """Which version a name stands for, who uses it, and where it is.

    A version (:class:`Record`) is registered, then retired by removal or replacement. It leaves the
    device when nobody uses it, and everything of it is gone when nothing holds it either:
    :meth:`_settle` is the one place that decides so.

    Methods without an underscore take the lock, except where they say that they expect it.
    """

    def __init__(
        self,
        lock: threading.Condition,
        device: DeviceTier,
        backing: Backing,
        timeline: Timeline,
        counters: Counters,
    ) -> None:
        self.lock = lock
        self.device = device
        self.backing = backing
        self.records: dict[str, Record] = {}
        self.retired: dict[Record, None] = {}
        self.counters = counters
        self.is_closed = False
        self._timeline = timeline

    def find(self, name: str) -> Record:
        """The version that a name stands for now; expects the lock.

        Raises:
            TypeError: not a string. UnknownAdapterError: none.
        """
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, got {type(name).__name__}")
        record = self.records.get(name)
        if record is None:
            raise UnknownAdapterError(f"no adapter is registered under the name {name!r}")
        return record

    def check_open(self) -> None:
        """Refuse work on a closed pool; expects the lock."""
        if self.is_closed:
            raise PoolError("the pool is closed")

    def check_addable(self, name: str, replace: bool) -> None:
        """Refuse a name that is taken; expects the lock."""
        self.check_open()
        if name in self.records and not replace:
            raise AdapterExistsError(
                f"an adapter is registered under the name {name!r} already; "
                f"replace=True takes its place"
            )

    def check_size(self, num_pages: int) -> None:
        """Refuse at once what could never be acquired; needs no lock."""
        arena, host = self.device.arena, self.backing.host
        if num_pages > len(arena) or not host.can_ever_hold(num_pages):
            raise PoolFullError(
                f"the adapter takes {num_pages * host.page_bytes} bytes, more than the whole arena "
                f"({arena.numel()} bytes) or the host budget"
            )

    def find_twin(self, record: Record) -> str | None:
        """Name of an adapter that came from the same folder under another name, None if none."""
        if not record.source:
            return None
        with self.lock:
            twins = (r.name for r in self.records.values() if r.source == record.source)
            return next((twin for twin in twins if twin != record.name), None)

    def register(self, record: Record, pages: IntArray, replace: bool) -> None:
        """Publish a version whose weights lie in host pages, retiring the one it replaces."""
        name = record.name
        with self.lock:
            self.check_addable(name, replace)
            old = self.records.get(name)
            if old is not None:
                record.is_pinned = old.is_pinned
                self._retire(old)
            self.backing.adopt(record, pages)
            self.records[name] = record

    def remove(self, name: str) -> None:
        """Retire the version that a name stands for."""
        with self.lock:
            self.check_open()
            self._retire(self.find(name))
            del self.records[name]
            self.lock.notify_all()

    def unpin(self, name: str) -> None:
        """Let the version that a name stands for be evicted again."""
        with self.lock:
            record = self.find(name)
            record.is_pinned = False
            self._settle(record)
            self.lock.notify_all()

    def acquire(self, names: Sequence[str | None]) -> dict[str, Record]:
        """Bring adapters to the device and count the caller as their user."""

        def use(records: Collection[Record]) -> None:
            self.counters.leases += 1
            for record in records:
                record.users += 1

        return self._bring(names, use)

    def load(self, names: Sequence[str | None], *, is_pinned: bool) -> None:
        """Bring adapters to the device, and keep them there only if they are to be pinned."""

        def pin(records: Collection[Record]) -> None:
            for record in records:
                record.is_pinned |= is_pinned and not record.is_retired

        self._bring(names, pin)

    def _bring(
        self, names: Sequence[str | None], keep: Callable[[Collection[Record]], None]
    ) -> dict[str, Record]:
        """Bring adapters to the device; ``keep`` is called under the lock when all are there."""
        with self.lock:
            records = self._look_up(names)
            if all(r.place is not None for r in records.values()):
                for record in records.values():
                    self.device.idle.pop(record, None)
                    self.backing.touch(record)
                self._stay(records.values(), keep)
                return records
            mine = dict.fromkeys(records.values())  # in their order, and quick to look into
            for record in mine:
                self.backing.hold(record)
        try:
            while not self._try_to_load(mine, keep):
                pass
        finally:
            with self.lock:
                for record in mine:
                    self.backing.unhold(record)
        return records

    def _try_to_load(
        self, records: Collection[Record], keep: Callable[[Collection[Record]], None]
    ) -> bool:
        """Bring held records to the device, unless some left it for disk meanwhile."""
        kept = self._stage(records)
        try:
            rooms = self._set_aside(records, kept)
            if rooms is None:
                return False
            try:
                self._load(rooms)
            except BaseException:
                self._leave(records, lambda records: None)
                raise
            self._leave(records, keep)
            return True
        finally:
            with self.lock:
                self.backing.unkeep(kept)

    def _leave(
        self, records: Collection[Record], keep: Callable[[Collection[Record]], None]
    ) -> None:
        """End a call that brought adapters to the device, or tried to."""
        with self.lock:
            for record in records:
                record.comers -= 1
            self.lock.notify_all()
            self._stay(records, keep)

    def _stay(
        self, records: Collection[Record], keep: Callable[[Collection[Record]], None]
    ) -> None:
        keep(records)
        self._settle_all(r for r in records if not r.is_used)

    def _settle_all(self, records: Iterable[Record]) -> None:
        """All of them, even if one cannot be taken off the device."""
        failures: list[Exception] = []
        for record in records:
            try:
                self._settle(record)
            except Exception as error:  # noqa: PERF203
                failures.append(error)
        if failures:
            raise failures[0]

    def loading(self, records: Iterable[Record]) -> list[Record]:
        """Those of a lease's adapters that are still on their way."""
        with self.lock:
            return [r for r in records if not self.device.check_ready(r)]

    def release(self, records: Collection[Record], use: tuple[Hashable, Mark] | None) -> None:
        """End the use of adapters, all of them even if one cannot be taken off the device.

        Args:
            records: what :meth:`acquire` returned.
            use: stream and end of the work that may still read them, None if there is none.
        """
        with self.lock:
            self.counters.leases -= 1
            for record in records:
                if use is not None:
                    record.last_use[use[0]] = use[1]
                record.users -= 1
            self.lock.notify_all()
            self._settle_all(records)

    def _look_up(self, names: Sequence[str | None]) -> dict[str, Record]:
        """The version of every name, in the order of their first appearance; changes nothing."""
        self.check_open()
        records = {name: self.find(name) for name in dict.fromkeys(names) if name is not None}
        slots = self.device.entries.shape[0]
        if len(records) > slots:
            raise PoolFullError(
                f"{len(records)} different adapters were asked for, the pool has {slots} slots"
            )
        missing = sum(1 for r in records.values() if r.place is None)
        self.counters.misses += missing
        self.counters.hits += len(records) - missing
        return records

    def _stage(self, records: Collection[Record]) -> frozenset[Record]:
        """Get those of held records into host memory that are not on the device, and keep them.

        What another call has may be free again in a moment, or may become a lease. So a call waits
        for those under way, and is refused only what leases and pins leave no room for. No two
        calls can wait for each other, because things are taken in one order, each kind at once:

        1. Who waits for host pages (here and in :meth:`Backing.store`) has nothing, only a promise
           that some copy of his adapters stays.
        2. Who waits for slots and pages of the device (:meth:`_set_aside`) has nothing but host
           pages. If it turns out that he needs more of those, he gives them back and starts again.
        3. Who has room on the device waits for nobody: he issues copies, then ends. The same goes
           for who reads or writes host pages.

        So whoever waits does so for calls of a higher number. A call starts again only when another
        one has got what it needed.
        """
        while True:
            with self.lock:
                missing = self._await_room(records)
                unstaged = [r for r in missing if r.host is None]
                count = sum(r.num_pages for r in unstaged)
                pages = self.backing.claim(count)
                if pages is not None:
                    self.backing.keep(missing)
                    for record in unstaged:
                        record.is_staging = True
                    for record in (r for r in records if r in self.device.idle):
                        self.device.idle.move_to_end(record)  # wanted when the rest is there
                    break
            self.backing.make_room(count, staying=records)
        try:
            self.backing.stage(unstaged, pages)
        except BaseException:
            with self.lock:
                self.backing.unkeep(missing)
            raise
        return frozenset(missing)

    def _await_room(self, records: Collection[Record]) -> list[Record]:
        """Wait until what is missing of records fits on the device; nothing is taken."""
        while True:
            self.check_open()
            if not any(r.is_loading or r.is_staging for r in records):
                missing = [r for r in records if r.place is None]
                if self.device.check_room(missing, records):
                    return missing
            self.lock.wait()

    def _set_aside(
        self, records: Collection[Record], kept: frozenset[Record]
    ) -> list[tuple[Record, Room]] | None:
        """Room on the device for what is missing of records, which all come into use.

        Returns:
            None if more is missing than what is kept in host memory; nothing is taken then.
        """
        with self.lock:
            missing = self._await_room(records)
            if not kept.issuperset(missing):
                return None
            try:
                self.device.make_room(missing, records)
            finally:
                self._sweep()
            for record in records:
                record.comers += 1
                self.device.idle.pop(record, None)
                self.backing.touch(record)
                if record.is_retired:  # while it waited without having anything
                    self.retired[record] = None
            return [(record, self.device.reserve(record)) for record in missing]

    def _load(self, rooms: Sequence[tuple[Record, Room]]) -> None:
        """Issue the copies of adapters; while that goes on, other threads can use the pool."""
        try:
            for record, room in rooms:
                place = self.device.issue(record, room, self.backing.host)
                with self.lock:
                    self.device.publish(record, place)
                    self.lock.notify_all()
        except BaseException:
            with self.lock:
                for record, room in rooms:
                    if record.is_loading:
                        self.device.abandon(record, room)
            raise

    def _retire(self, record: Record) -> None:
        if not record.is_used and record.place is not None:
            self.device.evict(record)  # first: the only step that can fail
        record.is_retired = True
        record.is_pinned = False
        self.retired[record] = None
        self._settle(record)

    def _settle(self, record: Record) -> None:
        """Put a version where its users, its pin and its holds allow it to be."""
        if not record.is_used and record.place is not None:
            if record.is_retired:
                self.device.idle[record] = None  # where the next load finds it if this fails
                self.device.evict(record)
            elif not record.is_pinned:
                self.device.idle[record] = None
        if record.is_retired:
            if record.holds == 0:
                self.backing.drop(record)
            if not record.is_used:
                self.retired.pop(record, None)

    def _sweep(self) -> None:
        """Finish the versions that were retired while the device did not let them go."""
        for record in [r for r in self.retired if not r.is_used and r.place is None]:
            self._settle(record)
