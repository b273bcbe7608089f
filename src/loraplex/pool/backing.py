"""The copies that outlive the device: host memory, and below it the disk."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
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
        self._is_making_room = False

    def store(self, image: Tensor) -> IntArray:
        """Put a packed adapter into host memory; takes the lock.

        With a disk tier this claims the adapter's room there too, though it may never be written:
        so whoever is registered can always make way in host memory, and come back.

        Raises:
            PoolFullError: the tiers below the device are full.
        """
        with self._lock:
            if self.disk is not None and not self.disk.reserve(image.nbytes):
                raise PoolFullError(
                    f"the pool's disk tier has no room for {image.nbytes} bytes: "
                    f"{self.disk.num_reserved} of {self.disk.budget} are taken"
                )
        pages = None
        try:
            pages = self._reserve(len(image))
            self.host.write(pages, image)
        except BaseException:
            self.abandon(pages, image.nbytes)
            raise
        return pages

    def abandon(self, pages: IntArray | None, num_bytes: int) -> None:
        """Undo :meth:`store` for an adapter that no record owns; takes the lock."""
        with self._lock:
            if pages is not None:
                self.host.release(pages)
            if self.disk is not None:
                self.disk.unreserve(num_bytes)
            self._lock.notify_all()

    def enter(self, record: Record) -> None:
        """Count a record's host pages as the most recently used; expects the lock."""
        self._in_host[record] = None

    def touch(self, record: Record) -> None:
        """A record was used; expects the lock."""
        if record.host is not None:
            self._in_host.move_to_end(record)

    def hold(self, record: Record) -> None:
        """Keep a record's copies as they are until :meth:`unhold`; expects the lock."""
        record.holds += 1

    def unhold(self, record: Record) -> None:
        """End a :meth:`hold`; expects the lock."""
        record.holds -= 1
        if record.is_retired and record.holds == 0:
            self.drop(record)

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

    def stage(self, record: Record) -> None:
        """Bring a record that the caller holds into host memory; takes the lock.

        Raises:
            PoolError: its file cannot be read. PoolFullError: there is no room.
        """
        with self._lock:
            while record.is_staging:
                self._lock.wait()
            if record.host is not None:
                return
            assert record.file is not None, "an adapter is in host memory or on disk"
            record.is_staging = True
        pages = None
        try:
            start = time.perf_counter()
            pages = self._reserve(record.num_pages)
            assert self.disk is not None
            self.disk.read(record.file, self.host.views(pages))
            seconds = time.perf_counter() - start
        except BaseException:
            with self._lock:
                if pages is not None:
                    self.host.release(pages)
                record.is_staging = False
                self._lock.notify_all()
            raise
        with self._lock:
            record.host, record.is_staging = pages, False
            record.last_copy = None
            self.enter(record)
            self._counters.disk_reads += 1
            self._counters.disk_seconds.add(seconds)
            self._lock.notify_all()

    def _reserve(self, count: int) -> IntArray:
        """Host pages, taken from others if need be; one thread at a time makes room."""
        with self._lock:
            while self._is_making_room:
                self._lock.wait()
            pages = self.host.allocate(count)
            if pages is not None:
                return pages
            self._is_making_room = True
        try:
            while pages is None:
                pages = self._make_room(count)
            return pages
        finally:
            with self._lock:
                self._is_making_room = False
                self._lock.notify_all()

    def _make_room(self, count: int) -> IntArray | None:
        """One step towards ``count`` free pages; the pages if they are there."""
        segment_pages, victim, path, mark = 0, None, None, None
        with self._lock:
            pages = self.host.allocate(count)
            if pages is not None:
                return pages
            segment_pages = self.host.growth()
            mark = self.host.leaving()
            if segment_pages <= 0 and mark is None:
                victim = self._victim()
                if victim is None:
                    raise PoolFullError(self._why_full(count))
                if victim.file is not None:
                    self._drop_host(victim)
                    return None
                assert self.disk is not None
                path = self.disk.new_path()
                self.hold(victim)
        if segment_pages > 0:
            segment = self.host.new_segment(segment_pages)
            with self._lock:
                self.host.attach(segment)
        elif victim is not None and path is not None:
            self._spill(victim, path)
        elif mark is not None:
            self._timeline.synchronize(mark)
        return None

    def _victim(self) -> Record | None:
        """The least recently used adapter whose host pages may go, None without a disk tier."""
        if self.disk is None:
            return None
        return next((r for r in self._in_host if r.holds == 0), None)

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
            self.unhold(victim)
            if victim.holds == 0:
                self._drop_host(victim)

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
