"""The adapters of a pool by name, and their way between the tiers."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Iterable, Sequence

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
            record.host = pages
            self.backing.enter(record)
            self.records[name] = record

    def remove(self, name: str) -> None:
        """Retire the version that a name stands for."""
        with self.lock:
            self.check_open()
            self._retire(self.find(name))
            del self.records[name]

    def set_pinned(self, records: Collection[Record], is_pinned: bool) -> None:
        """Keep versions on the device, or let them go again; expects the lock."""
        for record in records:
            record.is_pinned = is_pinned and not record.is_retired
            self._settle(record)

    def acquire(self, names: Sequence[str | None]) -> dict[str, Record]:
        """Bring adapters to the device and count the caller as their user."""
        with self.lock:
            records = self._enroll(names)
            missing = [r for r in records.values() if r.place is None]
            self.counters.misses += len(missing)
            self.counters.hits += len(records) - len(missing)
            if not missing:
                return records
            for record in missing:
                self.backing.hold(record)
        try:
            self._fetch(missing)
        except BaseException:
            self.release(records.values(), None)
            raise
        return records

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
            failures: list[Exception] = []
            for record in records:
                try:
                    self._settle(record)
                except Exception as error:  # noqa: PERF203
                    failures.append(error)
            if failures:
                raise failures[0]

    def _enroll(self, names: Sequence[str | None]) -> dict[str, Record]:
        """Look every name up before anything changes, then count a user for each."""
        self.check_open()
        records = {name: self.find(name) for name in dict.fromkeys(names) if name is not None}
        slots = self.device.entries.shape[0]
        if len(records) > slots:
            raise PoolFullError(
                f"{len(records)} different adapters were asked for, the pool has {slots} slots"
            )
        for record in records.values():
            record.users += 1
            if record.place is not None:
                self.device.idle.pop(record, None)
            self.backing.touch(record)
        self.counters.leases += 1
        return records

    def _fetch(self, missing: Sequence[Record]) -> None:
        """Held records from disk to host, then to the device; the lock is for planning alone."""
        try:
            with self.lock:
                self.device.check_room([r for r in missing if r.place is None and not r.is_loading])
                unstaged = [r for r in missing if r.host is None]
            for record in unstaged:
                self.backing.stage(record)
            with self.lock:
                # Whoever loads waits for nobody, so this ends.
                while any(r.is_loading for r in missing):
                    self.lock.wait()
                absent = [r for r in missing if r.place is None]
                try:
                    self.device.make_room(absent)
                finally:
                    self._sweep()
                rooms = [(record, self.device.reserve(record)) for record in absent]
            self._load(rooms)
        finally:
            with self.lock:
                for record in missing:
                    self.backing.unhold(record)

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
                self.lock.notify_all()
            raise

    def _retire(self, record: Record) -> None:
        if record.users == 0 and record.place is not None:
            self.device.evict(record)  # first: the only step that can fail
        record.is_retired = True
        record.is_pinned = False
        self.retired[record] = None
        self._settle(record)

    def _settle(self, record: Record) -> None:
        """Put a version where its users, its pin and its holds allow it to be."""
        if record.users == 0 and record.place is not None:
            if record.is_retired:
                self.device.idle[record] = None  # where the next load finds it if this fails
                self.device.evict(record)
            elif not record.is_pinned:
                self.device.idle[record] = None
        if record.is_retired:
            if record.holds == 0:
                self.backing.drop(record)
            if record.users == 0:
                self.retired.pop(record, None)

    def _sweep(self) -> None:
        """Finish the versions that were retired while the device did not let them go."""
        for record in [r for r in self.retired if r.users == 0 and r.place is None]:
            self._settle(record)
