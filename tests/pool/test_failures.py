"""Exceptions half-way: what failed is reported, and everything else is as it was."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex import AdapterError, PoolError, PoolFullError
from loraplex.pool.disk import DiskTier
from loraplex.pool.host import HostTier
from loraplex.pool.timeline import timeline_of


def fingerprint(pool: Any) -> tuple[Any, ...]:
    """All that a failed call must not change."""
    stats = pool.stats()
    infos = {name: pool.info(name) for name in pool.names()}
    leases = {name: info.leases for name, info in infos.items()}
    return leases, stats.leases, stats.retired, stats.host.adapters, stats.host.used


class Faulty:
    """A timeline that fails at the n-th copy or clearing."""

    def __init__(self, device: torch.device) -> None:
        self._inner = timeline_of(device)
        self.fuse = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _burn(self) -> None:
        self.fuse -= 1
        if self.fuse == 0:
            raise RuntimeError("injected")

    def copy_(self, targets: Any, sources: Any) -> None:
        self._burn()
        self._inner.copy_(targets, sources)

    def clear_(self, target: Any) -> None:
        self._burn()
        self._inner.clear_(target)


@pytest.mark.parametrize("fuse", range(1, 9))
def test_a_copy_that_fails(kit: Any, fuse: int) -> None:
    timeline = Faulty(kit.device)
    pool = kit.pool(max_adapters=2, timeline=timeline)
    adapters = {name: kit.adapter(seed) for seed, name in enumerate("abcd")}
    for name, adapter in adapters.items():
        pool.add(name, adapter)
    held = pool.acquire(["a"])
    pool.acquire(["b"]).release()
    before = fingerprint(pool)
    timeline.fuse = fuse
    failed = False
    try:
        pool.acquire(["a", "c"]).release()
    except RuntimeError:
        failed = True
    assert failed == (fuse <= 7), "one clearing, the entries, five pages"
    assert fingerprint(pool) == before
    timeline.fuse = -1
    kit.assert_slot(pool, held.indices[0], adapters["a"])
    held.release()
    for name, adapter in adapters.items():
        kit.assert_serves(pool, name, adapter)
    for name in adapters:
        pool.remove(name)
    assert pool.stats().device.used == 0


def test_a_removal_that_fails_leaves_both_sides(kit: Any) -> None:
    timeline = Faulty(kit.device)
    pool = kit.pool(timeline=timeline)
    adapter = kit.adapter()
    pool.add("a", adapter)
    pool.acquire(["a"]).release()
    timeline.fuse = 1
    with pytest.raises(RuntimeError, match="injected"):
        pool.remove("a")
    assert pool.names() == ["a"]
    timeline.fuse = 1
    with pytest.raises(RuntimeError, match="injected"):
        pool.add("a", kit.adapter(1), replace=True)
    assert pool.stats().host.adapters == 1
    kit.assert_serves(pool, "a", adapter)
    pool.remove("a")
    assert pool.stats().host.used == 0


@pytest.fixture
def tiered(kit: Any, tmp_path: Path) -> Iterator[Any]:
    """Two adapters of which one is on disk alone."""
    probe = kit.pool()
    probe.add("probe", kit.adapter())
    size = int(probe.info("probe").num_bytes)
    pool = kit.pool(max_adapters=1, device_bytes=size, host_bytes=size, disk_dir=tmp_path)
    pool.add("a", kit.adapter(0))
    pool.add("b", kit.adapter(1))
    yield pool
    kit.assert_serves(pool, "a", kit.adapter(0))
    kit.assert_serves(pool, "b", kit.adapter(1))


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, PoolFullError), (errno.EIO, PoolError)])
def test_a_disk_that_cannot_be_written(
    kit: Any, tiered: Any, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    def fail(data: Any) -> int:
        raise OSError(code, "injected")

    before, disk = fingerprint(tiered), tiered.stats().disk
    with monkeypatch.context() as patch:
        patch.setattr("loraplex.pool.disk._checksum", fail)
        with pytest.raises(kind, match="cannot write a file: injected") as caught:
            tiered.add("c", kit.adapter(2))
        assert type(caught.value) is kind
    assert fingerprint(tiered) == before
    assert tiered.stats().disk == disk


@pytest.mark.parametrize("error", [MemoryError("injected"), KeyboardInterrupt()])
def test_a_read_that_is_interrupted(
    kit: Any, tiered: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(self: DiskTier, *args: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "read", fail)
        with pytest.raises(type(error)):
            tiered.acquire(["a"])
    assert tiered.stats().leases == 0
    assert tiered.info("a").leases == 0
    assert tiered.stats().host.used == 0  # b went to disk for a, which never arrived
    assert tiered.info("b").tiers == ("disk",)


def test_host_memory_that_cannot_be_had(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = kit.pool(device_bytes=1 << 20)
    pool.add("a", kit.adapter(0))

    def fail(self: HostTier, count: int) -> None:
        raise RuntimeError("out of pinned memory")

    def fail_to_write(self: HostTier, pages: Any, image: Any) -> None:
        raise RuntimeError("interrupted")

    for target, failure in (("write", fail_to_write), ("allocate", fail)):
        before = fingerprint(pool)
        with monkeypatch.context() as patch:
            patch.setattr(HostTier, target, failure)
            with pytest.raises(RuntimeError):
                pool.add("b", kit.adapter(1))
        assert fingerprint(pool) == before
    pool.add("b", kit.adapter(1))
    kit.assert_serves(pool, "b", kit.adapter(1))


def test_a_callback_that_fails(kit: Any) -> None:
    def base_weight(layer: str) -> torch.Tensor:
        raise LookupError(f"no weight for {layer}")

    pool = kit.pool(base_weight=base_weight)
    pool.add("a", kit.adapter())
    with pytest.raises(LookupError, match=r"layers\.0\.qkv"):
        pool.add("b", kit.adapter(magnitude=torch.ones))
    assert pool.names() == ["a"]


def test_a_reload_that_fails_keeps_the_old_version(kit: Any) -> None:
    pool = kit.pool(max_rank=8)
    old = kit.adapter(0)
    pool.add("a", old)
    with pytest.raises(AdapterError):
        pool.add("a", kit.adapter(1, rank=16), replace=True)
    kit.assert_serves(pool, "a", old)


@pytest.mark.parametrize("where", ["gate", "is_reached"])
def test_a_wait_that_fails_holds_nothing(
    kit: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies were issued; whoever asked gets the error, and no lease that nobody can end."""
    kit.device = torch.device("cpu")  # whose streams are simulated
    streams = kit.streams()
    pool = kit.pool(max_adapters=1, timeline=streams)
    adapter = kit.adapter()
    pool.add("a", adapter)
    before = fingerprint(pool)

    def fail(mark: Any) -> bool:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(streams, where, fail)
        with pytest.raises(RuntimeError, match="injected"):
            pool.acquire(["a"])
    assert fingerprint(pool) == before
    pool.add("b", kit.adapter(1))
    with pool.acquire(["b"]) as lease:  # the only slot is free for others
        assert lease.indices == [0]
    with pool.acquire(["a"]) as lease:
        streams.drain()
        kit.assert_slot(pool, lease.indices[0], adapter)
    streams.drain()


def test_a_release_that_fails_can_be_tried_again(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = kit.pool()
    pool.add("a", kit.adapter())
    lease = pool.acquire(["a"])
    with monkeypatch.context() as patch:
        patch.setattr(pool.timeline, "mark_use", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            lease.release()
    assert not lease.is_released
    assert lease.indices == [0]
    lease.release()
    assert pool.stats().leases == 0


def test_a_release_whose_eviction_fails_ends_the_use_of_all(kit: Any) -> None:
    """The last lease on a removed version takes it off the device, if need be later."""
    timeline = Faulty(kit.device)
    pool = kit.pool(max_adapters=3, timeline=timeline)
    adapters = {name: kit.adapter(seed) for seed, name in enumerate("abcd")}
    for name in "abc":
        pool.add(name, adapters[name])
    lease = pool.acquire(["a", "b", "c"])
    pool.remove("a")
    timeline.fuse = 1
    with pytest.raises(RuntimeError, match="injected"):
        lease.release()
    assert lease.is_released
    lease.release()
    stats = pool.stats()
    assert (stats.leases, stats.leased, stats.retired, stats.host.adapters) == (0, 0, 1, 2)
    pool.add("d", adapters["d"])
    with pool.acquire(["b", "c", "d"]):  # needs the slot of the version that did not leave
        pass
    stats = pool.stats()
    assert (stats.retired, stats.host.adapters, stats.slots_used) == (0, 3, 3)
    for name in "bcd":
        kit.assert_serves(pool, name, adapters[name])
        pool.remove(name)
    assert pool.stats().device.used == pool.stats().host.used == 0
