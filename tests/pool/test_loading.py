"""While one thread issues the copies of an adapter, all others can use the pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from loraplex import PoolFullError
from loraplex.pool.device import COPY_GROUPS
from loraplex.pool.timeline import timeline_of

PATIENCE = 30.0


class Slow:
    """A timeline whose next copy waits in the middle for the test, and then may fail."""

    def __init__(self, device: torch.device) -> None:
        self._inner = timeline_of(device)
        self.is_armed = False
        self.error: Exception | None = None
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def copy_(self, targets: Any, sources: Any) -> None:
        if self.is_armed:
            self.is_armed = False
            self.entered.set()
            assert self.go_on.wait(PATIENCE)
            if self.error is not None:
                raise self.error
        self._inner.copy_(targets, sources)


class Setup:
    """A pool in which one thread is in the middle of loading ``a``."""

    def __init__(self, kit: Any, threads: ThreadPoolExecutor, max_adapters: int) -> None:
        self.timeline, self.threads = Slow(kit.device), threads
        self.pool = kit.pool(max_adapters=max_adapters, timeline=self.timeline)
        self.adapters = {name: kit.adapter(seed) for seed, name in enumerate("abc")}
        for name, adapter in self.adapters.items():
            self.pool.add(name, adapter)
        self.pool.acquire(["b"]).release()
        self.timeline.is_armed = True
        self.first = self.begin(lambda: self.pool.acquire(["a"]))
        assert self.timeline.entered.wait(PATIENCE)

    def begin(self, call: Callable[[], Any]) -> Future[Any]:
        return self.threads.submit(call)

    def now(self, call: Callable[[], Any]) -> Any:
        """What a call gives that must not wait for the load; in a thread, so as not to hang."""
        return self.begin(call).result(PATIENCE)

    def await_holds(self, name: str, count: int) -> None:
        """Wait until so many calls that are under way need an adapter."""
        deadline = time.monotonic() + PATIENCE
        while self.pool._roster.records[name].holds < count:
            assert time.monotonic() < deadline
            time.sleep(1e-3)


@pytest.fixture
def make_setup(kit: Any) -> Any:
    threads = ThreadPoolExecutor(8)
    made: list[Setup] = []

    def make(max_adapters: int = 2) -> Setup:
        made.append(Setup(kit, threads, max_adapters))
        return made[-1]

    yield make
    for setup in made:
        setup.timeline.go_on.set()
    threads.shutdown()


def test_hits_and_other_loads_do_not_wait(kit: Any, make_setup: Any) -> None:
    setup = make_setup(max_adapters=3)
    pool = setup.pool
    for name in "bc":
        lease = setup.now(lambda name=name: pool.acquire([name]))
        kit.assert_slot(pool, lease.indices[0], setup.adapters[name])
        setup.now(lease.release)
    stats = setup.now(pool.stats)
    assert stats.loads == 2
    assert stats.device.used == 3 * pool.info("b").num_bytes, "what is set aside counts as used"
    assert not setup.now(lambda: pool.is_ready("a"))
    setup.timeline.go_on.set()
    with setup.first.result(PATIENCE) as lease:
        kit.assert_slot(pool, lease.indices[0], setup.adapters["a"])


def test_who_wants_the_same_adapter_waits_for_its_copies_to_be_issued(
    kit: Any, make_setup: Any
) -> None:
    setup = make_setup()
    second = setup.begin(lambda: setup.pool.acquire(["a", "b"]))
    setup.await_holds("a", 2)
    assert not second.done()
    setup.timeline.go_on.set()
    with setup.first.result(PATIENCE) as one, second.result(PATIENCE) as other:
        assert one.indices == other.indices[:1]
        kit.assert_slot(setup.pool, one.indices[0], setup.adapters["a"])
    assert setup.pool.stats().loads == 2, "b, and a once"
    assert setup.pool.stats().leases == 0


@pytest.mark.parametrize("fails", [False, True])
def test_who_needs_what_is_set_aside_waits_for_what_becomes_of_it(
    kit: Any, make_setup: Any, fails: bool
) -> None:
    """It is refused once a lease holds the slot, and served if the load failed."""
    setup = make_setup()
    held = setup.now(lambda: setup.pool.acquire(["b"]))
    second = setup.begin(lambda: setup.pool.acquire(["c"]))
    setup.await_holds("c", 1)
    time.sleep(0.05)
    assert not second.done()
    setup.timeline.error = RuntimeError("injected") if fails else None
    setup.timeline.go_on.set()
    if fails:
        with pytest.raises(RuntimeError, match="injected"):
            setup.first.result(PATIENCE)
        second.result(PATIENCE).release()
    else:
        with setup.first.result(PATIENCE), pytest.raises(PoolFullError, match="2 of 2 slots"):
            second.result(PATIENCE)
    held.release()
    for name, adapter in setup.adapters.items():
        kit.assert_serves(setup.pool, name, adapter)


def test_a_prefetch_holds_nothing_against_a_step(kit: Any, make_setup: Any) -> None:
    setup = make_setup()
    setup.timeline.go_on.set()
    setup.first.result(PATIENCE).release()
    setup.timeline.go_on.clear()
    setup.timeline.entered.clear()
    setup.timeline.is_armed = True
    loading = setup.pool.prefetch(["c"])
    assert setup.timeline.entered.wait(PATIENCE)
    second = setup.begin(lambda: setup.pool.acquire(["a", "b"]))
    setup.await_holds("a", 1)
    assert not second.done()
    setup.timeline.go_on.set()
    loading.result(PATIENCE)
    with second.result(PATIENCE) as lease:
        kit.assert_slot(setup.pool, lease.indices[0], setup.adapters["a"])


@pytest.mark.parametrize("is_replaced", [True, False])
def test_an_adapter_that_is_removed_while_it_loads(
    kit: Any, make_setup: Any, is_replaced: bool
) -> None:
    setup = make_setup()
    pool, old = setup.pool, setup.adapters["a"]
    if is_replaced:
        setup.now(lambda: pool.add("a", kit.adapter(9), replace=True))
    else:
        setup.now(lambda: pool.remove("a"))
    assert pool.stats().retired == 1
    setup.timeline.go_on.set()
    with setup.first.result(PATIENCE) as lease:
        kit.assert_slot(pool, lease.indices[0], old)
    stats = pool.stats()
    assert (stats.retired, stats.resident, stats.host.adapters) == (0, 1, 2 + is_replaced)
    assert stats.device.used == pool.info("b").num_bytes
    if is_replaced:
        kit.assert_serves(pool, "a", kit.adapter(9))


def test_a_load_that_fails_leaves_it_to_whoever_waits(kit: Any, make_setup: Any) -> None:
    setup = make_setup()
    pool = setup.pool
    setup.timeline.error = RuntimeError("injected")
    second = setup.begin(lambda: pool.acquire(["a"]))
    setup.await_holds("a", 2)
    setup.timeline.go_on.set()
    with pytest.raises(RuntimeError, match="injected"):
        setup.first.result(PATIENCE)
    with second.result(PATIENCE) as lease:
        kit.assert_slot(pool, lease.indices[0], setup.adapters["a"])
    assert pool.stats().leases == 0
    for name in setup.adapters:
        pool.remove(name)
    assert pool.stats().device.used == pool.stats().host.used == 0


def test_the_rest_of_a_load_that_fails_is_given_back(kit: Any) -> None:
    """Three adapters in one acquire: one is there, one fails, and one never leaves."""
    timeline = Slow(kit.device)
    pool = kit.pool(max_adapters=3, timeline=timeline)
    adapters = {name: kit.adapter(seed) for seed, name in enumerate("abc")}
    for name, adapter in adapters.items():
        pool.add(name, adapter)
    pool.acquire(["a"]).release()
    pool.acquire(["b"]).release()
    size = pool.info("a").num_bytes
    pool.remove("b")
    pool.add("b", adapters["b"])
    timeline.is_armed, timeline.error = True, RuntimeError("injected")
    timeline.go_on.set()
    with pytest.raises(RuntimeError, match="injected"):
        pool.acquire(["a", "b", "c"])
    assert pool.stats().device.used == size
    assert pool.stats().slots_used == 1
    for name, adapter in adapters.items():
        kit.assert_serves(pool, name, adapter)


class Counting:
    """A timeline that counts what a load asks of it: each call is time in which others wait."""

    def __init__(self, device: torch.device) -> None:
        self._inner = timeline_of(device)
        self.copied: list[int] = []
        self.timed: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def copy_(self, targets: Any, sources: Any) -> None:
        self.copied.append(len(targets))
        self._inner.copy_(targets, sources)

    def mark(self, *, is_timed: bool = False) -> Any:
        self.timed.append(is_timed)
        return self._inner.mark(is_timed=is_timed)


def test_a_load_takes_few_calls_however_its_pages_lie(kit: Any) -> None:
    timeline = Counting(kit.device)
    layers, wide = kit.layers(8), kit.adapter(0, rank=32, layers=8)
    narrow = [kit.adapter(seed, layers=1, modules=("k",)) for seed in range(1, 41)]
    pool = kit.pool(
        max_adapters=41, layers=layers, page_bytes=8192, device_bytes=60 * 8192, timeline=timeline
    )
    pool.add("wide", wide)
    for i, adapter in enumerate(narrow):
        pool.add(str(i), adapter)
    with pool.acquire(map(str, range(40))):
        pass
    for i in range(0, 40, 2):
        pool.remove(str(i))
    held = pool.acquire(map(str, range(1, 40, 2)))  # every second page is taken
    timeline.copied.clear()
    timeline.timed.clear()
    with pool.acquire(["wide"]) as lease:
        kit.assert_slot(pool, lease.indices[0], wide)
    assert sum(timeline.copied) > 20, "the pages are scattered, or this shows nothing"
    assert len(timeline.copied) <= COPY_GROUPS + 1, "the entries, then the groups"
    assert timeline.timed == [True, *[False] * (len(timeline.copied) - 1), True]
    held.release()
