"""What a pool says about itself."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from loraplex.pool.record import Record
from loraplex.pool.roster import Roster
from loraplex.pool.stats import PoolStats, TierStats


@dataclass(frozen=True)
class AdapterInfo:
    """One registered adapter; says nothing of where its files are.

    Attributes:
        name: as registered.
        max_rank: largest rank of its modules, as trained.
        num_bytes: bytes that it takes in a tier.
        base_model: what it was trained on, as far as it says.
        tiers: of ``"device"``, ``"host"``, ``"disk"``, those that hold a copy.
        leases: leases that hold it now.
        is_pinned: never evicted.
    """

    name: str
    max_rank: int
    num_bytes: int
    base_model: str | None
    tiers: tuple[str, ...]
    leases: int
    is_pinned: bool


def describe(record: Record) -> AdapterInfo:
    """One adapter as it is now; expects the pool's lock."""
    places = {"device": record.place, "host": record.host, "disk": record.file}
    return AdapterInfo(
        name=record.name,
        max_rank=record.manifest.max_rank,
        num_bytes=record.num_bytes,
        base_model=record.base_model,
        tiers=tuple(tier for tier, place in places.items() if place is not None),
        leases=record.users,
        is_pinned=record.is_pinned,
    )


def snapshot(roster: Roster) -> PoolStats:
    """The numbers of a pool; expects its lock."""
    device, backing, counters = roster.device, roster.backing, roster.counters
    records, retired = roster.records.values(), roster.retired
    device.measure()
    host, disk = backing.host, backing.disk
    page_bytes = host.page_bytes
    everything = [*records, *retired]
    return PoolStats(
        registered=len(records),
        resident=len(device.resident),
        leased=sum(1 for r in everything if r.users),
        retired=len(retired),
        leases=counters.leases,
        slots=device.entries.shape[0],
        slots_used=len(device.resident),
        device=TierStats(
            budget=device.arena.numel(),
            reserved=device.arena.numel(),
            used=(device.allocator.num_pages - device.allocator.num_free) * page_bytes,
            live=_live(device.resident),
            adapters=len(device.resident),
        ),
        host=TierStats(
            budget=None if host.budget_pages is None else host.budget_pages * page_bytes,
            reserved=host.num_reserved * page_bytes,
            used=host.num_used * page_bytes,
            live=_live([r for r in everything if r.host is not None]),
            adapters=sum(1 for r in everything if r.host is not None),
        ),
        disk=None
        if disk is None
        else TierStats(
            budget=disk.budget,
            reserved=disk.num_reserved,
            used=sum(r.num_bytes for r in everything if r.file is not None),
            live=_live([r for r in everything if r.file is not None]),
            adapters=sum(1 for r in everything if r.file is not None),
        ),
        largest_free_run=device.allocator.largest_run() * page_bytes,
        hits=counters.hits,
        misses=counters.misses,
        evictions=counters.evictions,
        spills=counters.spills,
        disk_reads=counters.disk_reads,
        loads=counters.loads,
        loaded_bytes=counters.loaded_bytes,
        load_seconds=counters.load_seconds.copy(),
        disk_seconds=counters.disk_seconds.copy(),
    )


def _live(records: Collection[Record]) -> int:
    return sum(r.manifest.layout.live_bytes for r in records)
