"""Numbers about a pool."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

LATENCY_BOUNDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Upper ends of the buckets, in seconds; one more bucket holds what is longer."""


@dataclass
class Latencies:
    """A histogram of durations.

    Attributes:
        counts: observations per bucket of ``LATENCY_BOUNDS`` and one for longer ones.
        total: sum of all durations in seconds.
        longest: the longest one in seconds.

    Example:
        >>> waits = Latencies()
        >>> for seconds in (0.0003, 0.0004, 0.3):
        ...     waits.add(seconds)
        >>> waits.count, waits.quantile(0.5), waits.longest
        (3, 0.0005, 0.3)
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    total: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect.bisect_left(LATENCY_BOUNDS, seconds)] += 1
        self.total += seconds
        self.longest = max(self.longest, seconds)

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean in seconds, 0 without observations."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """Upper end of the bucket in which the quantile lies, at most the longest duration."""
        seen, wanted = 0, q * self.count
        for bound, count in zip(LATENCY_BOUNDS, self.counts, strict=False):
            seen += count
            if seen and seen >= wanted:
                return min(bound, self.longest)
        return self.longest

    def copy(self) -> Latencies:
        """The histogram as it is now."""
        return Latencies(list(self.counts), self.total, self.longest)


@dataclass(frozen=True)
class TierStats:
    """One tier in bytes.

    Attributes:
        budget: most that the tier may take, None for no limit.
        reserved: memory or disk space held now, used or not.
        used: part of it in pages that hold adapters.
        live: weights in those pages; the rest of ``used`` is the pages' own waste.
        adapters: adapters in the tier; one that is in two tiers counts in both.
    """

    budget: int | None
    reserved: int
    used: int
    live: int
    adapters: int

    @property
    def fragmentation(self) -> float:
        """Share of the used pages that holds no weights, 0 for an empty tier."""
        return 1.0 - self.live / self.used if self.used else 0.0


@dataclass(frozen=True)
class PoolStats:
    """A snapshot of a pool, taken under its lock.

    Attributes:
        registered: adapters that can be acquired.
        resident: adapters on the device; leased: those that may not be evicted now.
        retired: versions removed or replaced that a lease still holds.
        leases: leases that were not released yet.
        slots, slots_used: adapter slots of the tables.
        device, host, disk: the tiers; ``disk`` is None without a disk tier.
        largest_free_run: bytes of the longest run of free device pages.
        hits, misses: adapters acquired that were, or were not, on the device.
        evictions: adapters that had to leave the device for others.
        spills: adapters written from host memory to disk; disk_reads: read back.
        loads: copies to the device; loaded_bytes: bytes of their pages.
        load_seconds: host to device, first byte to last, on the copy stream.
        disk_seconds: disk to host.
        outside_host, outside_device: bytes that an attached model keeps beside the tiers, for what
            adapters have other than LoRA on linear layers; 0 for a pool alone.
    """

    registered: int
    resident: int
    leased: int
    retired: int
    leases: int
    slots: int
    slots_used: int
    device: TierStats
    host: TierStats
    disk: TierStats | None
    largest_free_run: int
    hits: int
    misses: int
    evictions: int
    spills: int
    disk_reads: int
    loads: int
    loaded_bytes: int
    load_seconds: Latencies
    disk_seconds: Latencies
    outside_host: int = 0
    outside_device: int = 0


@dataclass
class Counters:
    """What a pool counts as it goes."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    spills: int = 0
    disk_reads: int = 0
    loads: int = 0
    loaded_bytes: int = 0
    leases: int = 0
    load_seconds: Latencies = field(default_factory=Latencies)
    disk_seconds: Latencies = field(default_factory=Latencies)
