"""The tiers below the device: spilling, reading back, budgets, and what happens meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from loraplex import PoolError, PoolFullError
from loraplex.pool.disk import DiskTier


def size_of_one(kit: Any) -> int:
    probe = kit.pool()
    probe.add("probe", kit.adapter())
    return int(probe.info("probe").num_bytes)


@pytest.fixture
def small(kit: Any, tmp_path: Path) -> Any:
    """Six adapters: one fits on the device, two in host memory, the rest is on disk."""
    size = size_of_one(kit)
    pool = kit.pool(
        max_adapters=1, device_bytes=size, host_bytes=2 * size, disk_dir=tmp_path, disk_bytes=None
    )
    for seed in range(6):
        pool.add(str(seed), kit.adapter(seed))
    return pool


def test_what_does_not_fit_goes_to_disk_and_comes_back(kit: Any, small: Any) -> None:
    stats = small.stats()
    assert (stats.host.adapters, stats.disk.adapters, stats.spills) == (2, 4, 4)
    for _ in range(2):
        for seed in range(6):
            kit.assert_serves(small, str(seed), kit.adapter(seed))
    stats = small.stats()
    assert stats.spills == 6  # weights never change: each is written once
    assert stats.disk_reads == 12
    assert stats.disk_seconds.count == stats.disk_reads


def test_files_are_private_and_go_away(kit: Any, small: Any, tmp_path: Path) -> None:
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    assert len(list(folder.iterdir())) == 4
    for seed in range(6):
        small.remove(str(seed))
    assert list(folder.iterdir()) == []
    assert small.stats().disk.used == 0
    small.close()
    assert not folder.exists()


@pytest.mark.parametrize("damage", ["cut", "flip", "delete"])
def test_a_damaged_file_is_an_error_for_its_adapter_alone(
    kit: Any, small: Any, tmp_path: Path, damage: str
) -> None:
    (folder,) = tmp_path.iterdir()
    victim = min(folder.iterdir())  # the first to be written: adapter 0
    data = bytearray(victim.read_bytes())
    if damage == "cut":
        victim.write_bytes(data[:-1])
    elif damage == "flip":
        data[100] ^= 1
        victim.write_bytes(data)
    else:
        victim.unlink()
    before = small.stats()
    with pytest.raises(PoolError, match="disk tier") as caught:
        small.acquire(["0"])
    assert str(tmp_path) not in str(caught.value)
    after = small.stats()
    assert (after.leases, after.registered) == (0, before.registered)
    for seed in range(1, 6):
        kit.assert_serves(small, str(seed), kit.adapter(seed))
    small.add("0", kit.adapter(10), replace=True)
    kit.assert_serves(small, "0", kit.adapter(10))


def test_a_full_disk_tier_refuses_the_newcomer(kit: Any, tmp_path: Path) -> None:
    size = size_of_one(kit)
    pool = kit.pool(
        max_adapters=1,
        device_bytes=size,
        host_bytes=size,
        disk_dir=tmp_path,
        disk_bytes=3 * size + 100,
    )
    for seed in range(3):
        pool.add(str(seed), kit.adapter(seed))
    with pytest.raises(PoolFullError, match="disk tier has no room"):
        pool.add("3", kit.adapter(3))
    assert pool.names() == ["0", "1", "2"]
    for seed in range(3):
        kit.assert_serves(pool, str(seed), kit.adapter(seed))
    pool.remove("1")
    pool.add("3", kit.adapter(3))
    kit.assert_serves(pool, "3", kit.adapter(3))


def test_room_on_disk_is_given_back_once(kit: Any, tmp_path: Path) -> None:
    """A version that is removed while it is in use has two ends: the removal, and its last use."""
    probe = kit.pool()
    probe.add("probe", kit.adapter())
    size = int(probe.info("probe").num_bytes)
    pool = kit.pool(
        max_adapters=2, device_bytes=2 * size, host_bytes=2 * size, disk_dir=tmp_path
    )  # fmt: skip
    pool.add("a", kit.adapter())
    one = pool.stats().disk.reserved
    for end in (lambda: pool.remove("a"), lambda: pool.add("a", kit.adapter(1), replace=True)):
        with pool.acquire(["a"]):
            end()
        pool.add("b", kit.adapter(2))
        assert pool.stats().disk.reserved == one * len(pool)
        pool.remove("b")
        if "a" not in pool:
            pool.add("a", kit.adapter())
    pool.remove("a")
    assert pool.stats().disk.reserved == 0


def test_a_full_host_tier_without_disk_refuses_the_newcomer(kit: Any) -> None:
    size = size_of_one(kit)
    pool = kit.pool(max_adapters=1, device_bytes=size, host_bytes=2 * size)
    for seed in range(2):
        pool.add(str(seed), kit.adapter(seed))
    with pytest.raises(PoolFullError, match="host tier has no room .* there is no disk tier"):
        pool.add("2", kit.adapter(2))
    with pytest.raises(PoolFullError, match="host tier"):
        pool.add("0", kit.adapter(2), replace=True)  # old and new have to fit side by side
    kit.assert_serves(pool, "0", kit.adapter(0))


def test_what_is_held_stays_in_host_memory(kit: Any, small: Any) -> None:
    backing, held = small._roster.backing, small._roster.records["4"]
    with small._roster.lock:
        backing.hold(held)  # as while it is being copied from
        held.keeps += 1
    small.add("6", kit.adapter(6))
    assert small.info("4").tiers == ("host",)
    assert small.info("5").tiers == ("disk",)
    with small._roster.lock:
        held.keeps -= 1
        backing.unhold(held)


def test_nobody_waits_for_a_disk_read(
    kit: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, may_go_on = threading.Event(), threading.Event()
    read = DiskTier.read

    def slow_read(self: DiskTier, *args: Any) -> None:
        started.set()
        assert may_go_on.wait(30)
        read(self, *args)

    monkeypatch.setattr(DiskTier, "read", slow_read)
    kit.assert_serves(small, "5", kit.adapter(5))  # in host memory, then on the device
    future = small.prefetch(["0"])
    assert started.wait(30)
    kit.assert_serves(small, "5", kit.adapter(5))
    small.remove("3")
    assert small.names() == ["0", "1", "2", "4", "5"]
    assert not future.done()
    may_go_on.set()
    future.result(timeout=30)
    monkeypatch.undo()
    kit.assert_serves(small, "0", kit.adapter(0))


def test_one_read_serves_all_that_wait_for_it(
    kit: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone = threading.Barrier(4)
    read, reads = DiskTier.read, []

    def counted(self: DiskTier, *args: Any) -> None:
        reads.append(1)
        threading.Event().wait(0.05)  # long enough for the others to arrive
        read(self, *args)

    monkeypatch.setattr(DiskTier, "read", counted)
    results: list[str] = []

    def use() -> None:
        everyone.wait(30)
        with small.acquire(["1"]) as lease:
            results.append(kit.mismatch(small, lease.indices[0], kit.adapter(1)))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [""] * 4
    assert len(reads) == 1


def test_removal_while_it_is_read_waits_for_its_end(
    kit: Any, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, may_go_on = threading.Event(), threading.Event()
    read = DiskTier.read

    def slow_read(self: DiskTier, *args: Any) -> None:
        started.set()
        assert may_go_on.wait(30)
        read(self, *args)

    monkeypatch.setattr(DiskTier, "read", slow_read)
    results: list[str] = []

    def use() -> None:
        with small.acquire(["0"]) as lease:
            results.append(kit.mismatch(small, lease.indices[0], kit.adapter(0)))

    thread = threading.Thread(target=use)
    thread.start()
    assert started.wait(30)
    small.remove("0")
    assert "0" not in small
    may_go_on.set()
    thread.join(30)
    assert results == [""]  # whoever had acquired it gets it
    stats = small.stats()
    assert (stats.retired, stats.resident) == (0, 0)
    assert stats.host.adapters + stats.disk.adapters == 5 + sum(
        1 for name in small.names() if small.info(name).tiers == ("host", "disk")
    )
