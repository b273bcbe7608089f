"""Room that calls under way have: others wait for it and are not refused; no circles."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from loraplex import PoolFullError
from loraplex.pool.disk import DiskTier
from loraplex.pool.host import HostTier

PATIENCE = 30.0
PAGE = 4096


class Gate:
    """Stops the first call of a method until the test opens it; then it may fail."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.error: Exception | None = None
        inner = getattr(owner, method)

        def stop_first(*args: Any) -> Any:
            if not self.entered.is_set():
                self.entered.set()
                assert self.opened.wait(PATIENCE)
                if self.error is not None:
                    raise self.error
            return inner(*args)

        patch.setattr(owner, method, stop_first)


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def small(kit: Any, seed: int) -> Any:
    """An adapter of one page."""
    return kit.adapter(seed, layers=1, modules=("k",))


def assert_waits(call: Future[Any]) -> None:
    time.sleep(0.05)  # it is refused at once, or not at all
    assert not call.done()


@pytest.fixture
def tight(kit: Any, tmp_path: Path) -> Any:
    """One page in each tier above the disk; a is on disk, b in host memory."""
    pool = kit.pool(
        max_adapters=1,
        page_bytes=PAGE,
        device_bytes=PAGE,
        host_bytes=PAGE,
        disk_dir=tmp_path,
        disk_bytes=4 * PAGE,
    )
    for seed, name in enumerate("ab"):
        pool.add(name, small(kit, seed))
    assert (pool.info("a").tiers, pool.info("b").tiers) == (("disk",), ("host",))
    return pool


@pytest.mark.parametrize("fails", [False, True])
def test_an_addition_that_has_the_host_pages_is_waited_for(
    kit: Any, tight: Any, threads: Any, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    gate = Gate(monkeypatch, HostTier, "write")
    adding = threads.submit(tight.add, "c", small(kit, 2))
    assert gate.entered.wait(PATIENCE)
    acquiring = threads.submit(tight.acquire, ["a"])
    assert_waits(acquiring)
    gate.error = RuntimeError("injected") if fails else None
    gate.opened.set()
    with acquiring.result(PATIENCE) as lease:
        kit.assert_slot(tight, lease.indices[0], small(kit, 0))
    if fails:
        with pytest.raises(RuntimeError, match="injected"):
            adding.result(PATIENCE)
    else:
        adding.result(PATIENCE)
        kit.assert_serves(tight, "c", small(kit, 2))
    kit.assert_serves(tight, "b", small(kit, 1))


def test_a_read_that_has_the_host_pages_is_waited_for(
    kit: Any, tight: Any, threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, DiskTier, "read")
    loading = tight.prefetch(["a"])
    assert gate.entered.wait(PATIENCE)
    adding = threads.submit(tight.add, "c", small(kit, 2))
    assert_waits(adding)
    acquiring = threads.submit(tight.acquire, ["b"])
    assert_waits(acquiring)
    gate.opened.set()
    loading.result(PATIENCE)
    adding.result(PATIENCE)
    acquiring.result(PATIENCE).release()
    for seed, name in enumerate("abc"):
        kit.assert_serves(tight, name, small(kit, seed))


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("fails", [False, True])
def test_an_addition_is_refused_when_the_other_one_has_succeeded(
    kit: Any,
    tmp_path: Path,
    threads: Any,
    monkeypatch: pytest.MonkeyPatch,
    tier: str,
    fails: bool,
) -> None:
    disk = {"disk_dir": tmp_path, "disk_bytes": PAGE + 100} if tier == "disk" else {}
    pool = kit.pool(max_adapters=1, page_bytes=PAGE, device_bytes=PAGE, host_bytes=PAGE, **disk)
    gate = Gate(monkeypatch, HostTier, "write")
    first = threads.submit(pool.add, "a", small(kit, 0))
    assert gate.entered.wait(PATIENCE)
    second = threads.submit(pool.add, "b", small(kit, 1))
    assert_waits(second)
    gate.error = RuntimeError("injected") if fails else None
    gate.opened.set()
    if fails:
        with pytest.raises(RuntimeError, match="injected"):
            first.result(PATIENCE)
        second.result(PATIENCE)
    else:
        first.result(PATIENCE)
        with pytest.raises(PoolFullError, match=f"{tier} tier has no room"):
            second.result(PATIENCE)
    assert pool.names() == ["b" if fails else "a"]


def test_calls_that_need_much_of_every_tier_never_wait_in_a_circle(
    kit: Any, tmp_path: Path, threads: Any
) -> None:
    """Without leases nothing is refused, whatever several calls need at a time."""
    pool = kit.pool(
        max_adapters=2,
        page_bytes=PAGE,
        device_bytes=2 * PAGE,
        host_bytes=2 * PAGE,
        disk_dir=tmp_path,
    )
    names = [str(seed) for seed in range(6)]
    for seed, name in enumerate(names):
        pool.add(name, small(kit, seed))

    def load(turn: int) -> None:
        for i in range(25):
            first = (turn + i) % 6
            pair = [names[first], names[(first + 1 + turn) % 6]]
            pool._roster.load(pair, is_pinned=False)

    def reload(turn: int) -> None:
        for i in range(25):
            seed = (turn + i) % 6
            pool.add(names[seed], small(kit, seed), replace=True)

    calls = [threads.submit(load, turn) for turn in range(4)]
    calls += [threads.submit(reload, turn) for turn in (0, 3)]
    for call in calls:
        call.result(PATIENCE)
    for seed, name in enumerate(names):
        kit.assert_serves(pool, name, small(kit, seed))
        pool.remove(name)
    stats = pool.stats()
    assert (stats.leases, stats.device.used, stats.host.used, stats.disk.reserved) == (0, 0, 0, 0)
