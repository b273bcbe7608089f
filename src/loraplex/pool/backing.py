"""The copies that outlive the device: host memory, and below it the disk."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from torch import Tensor

from loraplex.errors import PoolFullError
from loraplex.pool.disk import DiskTier
from loraplex.pool.host import HostTier
from loraplex.pool.pages import IntArray
from loraplex.pool.record import Record
from loraplex.pool.stats import Counters
from loraplex.pool.timeline import Timeline


class Backing:
    """Host and disk tier of a pool: every registered adapter is in one of them, or in both.

    Weights never change, so a copy that exists in two tiers is dropped from one without being
    written. The lock is the pool's; it is never held while memory is pinned, files are read or
    written, or a copy to the device is waited for.

    Methods say whether they take the lock themselves or expect it to be held.
    """

    def __init__(
        self,
        lock: threading.Condition,
        host: HostTier,
        disk: DiskTier | None,
        timeline: Timeline,
        counters: Counters,
    ) -> None:
        self.host = host
        self.disk = disk
        self._lock = lock
        self._timeline = timeline
        self._counters = counters
        self._in_host: OrderedDict[Record, None] = OrderedDict()
        self._held: dict[Record, None] = {}
        self._in_flight = 0  # adapters that were stored and are not registered yet
        self._is_making_room = False

    def store(self, image: Tensor) -> IntArray:
        """Put a packed adapter into host memory; takes the lock.

        With a disk tier this claims the adapter's room there too, though it may never be written:
        so whoever is registered can always make way in host memory, and come back. What was stored
        is in flight until :meth:`adopt` or :meth:`abandon`, of which one has to come soon.

        Raises:
            PoolFullError: the tiers below the device are full.
        """
        pages = None
        while pages is None:
            with self._lock:
                pages = self._claim_both(len(image), image.nbytes)
            if pages is None:
                self.make_room(len(image))
        try:
            self.host.write(pages, image)
        except BaseException:
            self.abandon(pages, image.nbytes)
            raise
        return pages

    def _claim_both(self, count: int, num_bytes: int) -> IntArray | None:
        """Room on disk and in host memory, both or neither, for what then is in flight."""
        disk, pages = self.disk, None
        while disk is not None and not disk.reserve(num_bytes):
            if not self._is_settling(may_move=False):
                raise PoolFullError(
                    f"the pool's disk tier has no room for {num_bytes} bytes: "
                    f"{disk.num_reserved} of {disk.budget} are taken"
                )
            self._lock.wait()
        try:
            pages = self.claim(count)
        finally:
            if pages is not None:
                self._in_flight += 1
            elif disk is not None:
                disk.unreserve(num_bytes)
        return pages

    def abandon(self, pages: IntArray, num_bytes: int) -> None:
        """Undo :meth:`store` for an adapter that no record owns; takes the lock."""
        with self._lock:
            self.host.release(pages)
            if self.disk is not None:
                self.disk.unreserve(num_bytes)
            self._in_flight -= 1
            self._lock.notify_all()

    def adopt(self, record: Record, pages: IntArray) -> None:
        """Give what was stored to a record; expects the lock."""
        self._in_flight -= 1
        self._enter(record, pages)

    def _enter(self, record: Record, pages: IntArray) -> None:
        record.host = pages
        self._in_host[record] = None
        self._lock.notify_all()

    def touch(self, record: Record) -> None:
        """A record was used; expects the lock."""
        if record.host is not None:
            self._in_host.move_to_end(record)

    def hold(self, record: Record) -> None:
        """Keep a copy of a record somewhere until :meth:`unhold`; expects the lock."""
        record.holds += 1
        self._held[record] = None

    def unhold(self, record: Record) -> None:
        """End a :meth:`hold`; expects the lock."""
        record.holds -= 1
        if record.holds == 0:
            del self._held[record]
            if record.is_retired:
                self.drop(record)
            self._lock.notify_all()

    def drop(self, record: Record) -> None:
        """Free all copies of a record that nothing holds; expects the lock.

        A version that was removed while leases use it on the device comes here a second time.
        """
        assert record.holds == 0
        if record.host is None and record.file is None:
            return
        self._drop_host(record)
        if self.disk is not None:
            self.disk.unreserve(record.num_bytes)
            if record.file is not None:
                record.file.unlink(missing_ok=True)
                record.file = None
        self._lock.notify_all()

    def stage(self, records: Sequence[Record], pages: IntArray) -> None:
        """Read adapters that the caller keeps into pages that he claimed; takes the lock.

        Raises:
            PoolError: a file cannot be read; what was read before is in host memory.
        """
        rest = list(records)
        try:
            while rest:
                own, pages = pages[: rest[0].num_pages], pages[rest[0].num_pages :]
                self._read(rest[0], own)
                rest.pop(0)
        except BaseException:
            with self._lock:
                for record in rest:
                    record.is_staging = False
                self.host.release(pages)
                self._lock.notify_all()
            raise

    def _read(self, record: Record, pages: IntArray) -> None:
        assert self.disk is not None
        assert record.file is not None, "an adapter is in host memory or on disk"
        start = time.perf_counter()
        try:
            self.disk.read(record.file, self.host.views(pages))
        except BaseException:
            with self._lock:
                self.host.release(pages)
            raise
        seconds = time.perf_counter() - start
        with self._lock:
            record.is_staging = False
            record.last_copy = None
            self._enter(record, pages)
            self._counters.disk_reads += 1
            self._counters.disk_seconds.add(seconds)

    def keep(self, records: Iterable[Record]) -> None:
        """Keep the host pages of held records until :meth:`unkeep`; expects the lock."""
        for record in records:
            record.keeps += 1

    def unkeep(self, records: Iterable[Record]) -> None:
        """End a :meth:`keep`; expects the lock."""
        for record in records:
            record.keeps -= 1
        self._lock.notify_all()

    def claim(self, count: int) -> IntArray | None:
        """Host pages that are free, None if there are too few; expects the lock."""
        return self.host.allocate(count)

    def make_room(self, count: int, staying: Collection[Record] = ()) -> None:
        """One step towards ``count`` free pages, after which the caller claims again.

        Takes the lock; the caller must not hold it, nor pages (see ``Roster._stage``). One thread
        at a time makes room. If all pages are in the hands of calls that will let them go, the
        step is to wait until one has.

        Args:
            count: pages that the caller wants.
            staying: adapters that are not to go for it.

        Raises:
            PoolFullError: there is no room, and nothing under way will change that.
            PoolError: an adapter cannot be written to disk.
        """
        segment_pages, victim, path, mark = 0, None, None, None
        with self._lock:
            if self._is_making_room:
                self._lock.wait()
                return
            if self.host.num_free >= count:
                return
            segment_pages = self.host.growth()
            mark = self.host.leaving()
            if segment_pages <= 0 and mark is None:
                victim = self._victim(staying)
                if victim is None:
                    if not self._is_settling(may_move=self.disk is not None):
                        raise PoolFullError(self._why_full(count))
                    self._lock.wait()
                    return
                if victim.file is not None:
                    self._drop_host(victim)
                    return
                assert self.disk is not None
                path = self.disk.new_path()
                self.hold(victim)
            self._is_making_room = True
        try:
            if segment_pages > 0:
                segment = self.host.new_segment(segment_pages)
                with self._lock:
                    self.host.attach(segment)
            elif victim is not None and path is not None:
                self._spill(victim, path)
            elif mark is not None:
                self._timeline.synchronize(mark)
        finally:
            with self._lock:
                self._is_making_room = False
                self._lock.notify_all()

    def _is_settling(self, *, may_move: bool) -> bool:
        """Whether calls are under way that may give room back, or up to others if it may move."""
        leaving = (r.is_retired or (may_move and r.keeps > 0) for r in self._held)
        return self._in_flight > 0 or any(leaving)

    def _victim(self, staying: Collection[Record]) -> Record | None:
        """The least recently used adapter whose host pages may go, None without a disk tier."""
        if self.disk is None:
            return None
        return next((r for r in self._in_host if r.keeps == 0 and r not in staying), None)

    def _spill(self, victim: Record, path: Path) -> None:
        """Write a held record to disk and free its host pages."""
        assert self.disk is not None
        assert victim.host is not None
        try:
            self.disk.write(path, self.host.views(victim.host))
        except BaseException:
            path.unlink(missing_ok=True)
            with self._lock:
                self.unhold(victim)
            raise
        with self._lock:
            victim.file = path
            self._counters.spills += 1
            if victim.keeps == 0:
                self._drop_host(victim)
            self.unhold(victim)

    def _drop_host(self, record: Record) -> None:
        if record.host is not None:
            self.host.release(record.host, record.last_copy)
            record.host = None
            del self._in_host[record]

    def _why_full(self, count: int) -> str:
        host = self.host
        budget = (host.budget_pages or 0) * host.page_bytes
        return (
            f"the pool's host tier has no room for {count * host.page_bytes} bytes: "
            f"{host.num_used * host.page_bytes} of {budget} are used"
            + ("" if self.disk else ", and there is no disk tier to move adapters to")
        )
