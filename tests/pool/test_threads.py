"""Many threads on one pool: leases always show one version, whole and unchanged."""

from __future__ import annotations

import contextlib
import random
import threading
from pathlib import Path
from typing import Any

from loraplex import PoolFullError, UnknownAdapterError

NAMES = [f"adapter-{i}" for i in range(6)]
ROUNDS = 60


class Worker:
    """Does its rounds and keeps what went wrong, which a thread could not raise."""

    def __init__(self, pool: Any, versions: Any, seed: int) -> None:
        self.pool, self.versions = pool, versions
        self.draw = random.Random(seed)
        self.problems: list[str] = []

    def run(self) -> None:
        try:
            for _ in range(ROUNDS):
                self.round()
        except Exception as error:
            self.problems.append(repr(error))

    def round(self) -> None:
        raise NotImplementedError


class User(Worker):
    def __init__(self, kit: Any, pool: Any, versions: Any, seed: int) -> None:
        super().__init__(pool, versions, seed)
        self.kit, self.used = kit, 0

    def round(self) -> None:
        names = self.draw.sample(NAMES, self.draw.randint(1, 2))
        with (
            contextlib.suppress(PoolFullError, UnknownAdapterError),
            self.pool.acquire(names) as lease,
        ):
            for name, slot in zip(names, lease.indices, strict=True):
                first, again = self.compare(name, slot), self.compare(name, slot)
                if "" not in first or first != again:
                    self.problems.append(f"{name}: {first}, then {again}")
            self.used += 1

    def compare(self, name: str, slot: int) -> list[str]:
        return [self.kit.mismatch(self.pool, slot, version) for version in self.versions[name]]


class Changer(Worker):
    def round(self) -> None:
        name = self.draw.choice(NAMES)
        if self.draw.random() < 0.2:
            with contextlib.suppress(UnknownAdapterError):
                self.pool.remove(name)
        self.pool.add(name, self.draw.choice(self.versions[name]), replace=True)


def test_threads_that_use_reload_and_remove(kit: Any, tmp_path: Path) -> None:
    probe = kit.pool()
    probe.add("probe", kit.adapter(rank=16))
    size = int(probe.info("probe").num_bytes)
    pool = kit.pool(max_adapters=4, device_bytes=3 * size, host_bytes=4 * size, disk_dir=tmp_path)
    # of each name two versions, which differ in rank and modules too
    versions = {
        name: (kit.adapter(i, rank=16), kit.adapter(100 + i, rank=8, modules=("k", "down")))
        for i, name in enumerate(NAMES)
    }
    for name in NAMES:
        pool.add(name, versions[name][0])
    users = [User(kit, pool, versions, seed) for seed in range(4)]
    threads = [threading.Thread(target=user.run) for user in users]
    changers = [Changer(pool, versions, seed) for seed in (10, 11)]
    threads += [threading.Thread(target=changer.run) for changer in changers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread is stuck"
    for worker in (*users, *changers):
        assert worker.problems == []
    assert sum(user.used for user in users) > ROUNDS
    for name in pool.names():
        pool.remove(name)
    stats = pool.stats()
    assert (stats.registered, stats.resident, stats.retired, stats.leases) == (0, 0, 0, 0)
    assert (stats.device.used, stats.host.used, stats.disk.used) == (0, 0, 0)


def test_threads_that_end_one_lease(kit: Any) -> None:
    pool = kit.pool()
    adapter = kit.adapter()
    pool.add("a", adapter)
    with pool.acquire(["a"]) as kept:
        for _ in range(40):
            lease = pool.acquire(["a"])
            start = threading.Barrier(4)

            def end(lease: Any = lease, start: threading.Barrier = start) -> None:
                start.wait()
                lease.release()

            threads = [threading.Thread(target=end) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=30)
            assert pool.info("a").leases == 1
        assert pool.stats().leases == 1
        kit.assert_slot(pool, kept.indices[0], adapter)
