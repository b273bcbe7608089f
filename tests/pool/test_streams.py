"""Copies against queued compute, on two simulated streams that move only when the test says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loraplex import PoolFullError


@pytest.fixture(autouse=True)
def _on_the_host(kit: Any) -> None:
    kit.device = torch.device("cpu")  # the simulated streams work on host memory


def launch_check(
    kit: Any, streams: Any, pool: Any, lease: Any, name: str, adapter: Any
) -> list[str]:
    """A kernel that reads a slot when it executes, not when it is launched."""
    found: list[str] = []
    slot = lease.indices[lease.names.index(name)]
    streams.launch(lambda: found.append(kit.mismatch(pool, slot, adapter)))
    return found


def test_acquire_never_waits_on_the_host(kit: Any) -> None:
    streams = kit.streams(may_synchronize=False)
    pool = kit.pool(max_adapters=2, timeline=streams)
    adapters = [kit.adapter(seed) for seed in range(6)]
    results = []
    for seed, adapter in enumerate(adapters):
        pool.add(str(seed), adapter)
    for seed, adapter in enumerate(adapters):
        with pool.acquire([str(seed)]) as lease:  # nothing has executed yet
            results.append(launch_check(kit, streams, pool, lease, str(seed), adapter))
    streams.drain()
    assert results == [[""]] * 6


def test_eviction_waits_for_the_step_that_is_queued(kit: Any) -> None:
    streams = kit.streams()
    pool = kit.pool(max_adapters=1, timeline=streams)
    old, new = kit.adapter(0), kit.adapter(1)
    pool.add("old", old)
    pool.add("new", new)
    with pool.acquire(["old"]) as lease:
        (slot,) = lease.indices
        streams.run("copy")
        result = launch_check(kit, streams, pool, lease, "old", old)
    with pool.acquire(["new"]) as lease:
        assert lease.indices == [slot]
        streams.run("copy")  # stops at the mark of the queued step
        assert kit.mismatch(pool, slot, old) == ""
        after = launch_check(kit, streams, pool, lease, "new", new)
        streams.run("compute")
        assert result == [""]
        assert after == []  # the new one has not arrived
        streams.drain()
    assert after == [""]


def test_removal_waits_for_the_step_that_is_queued(kit: Any) -> None:
    streams = kit.streams()
    pool = kit.pool(max_adapters=1, timeline=streams)
    old = kit.adapter(0)
    pool.add("a", old)
    with pool.acquire(["a"]) as lease:
        result = launch_check(kit, streams, pool, lease, "a", old)
    pool.remove("a")
    pool.add("a", kit.adapter(1))
    with pool.acquire(["a"]) as lease:
        after = launch_check(kit, streams, pool, lease, "a", kit.adapter(1))
    streams.drain()
    assert result == after == [""]


def test_host_pages_are_used_until_the_copy_from_them_is_done(kit: Any) -> None:
    """Asking is enough: nobody has to want pages before those that came back are seen."""
    streams = kit.streams()
    pool = kit.pool(max_adapters=1, timeline=streams)
    pool.add("a", kit.adapter())
    size = pool.info("a").num_bytes
    with pool.acquire(["a"]):
        pool.remove("a")
        assert pool.stats().host.used == size
    streams.drain()
    assert pool.stats().host.used == 0


def test_first_layers_are_usable_before_the_last_arrive(kit: Any) -> None:
    streams = kit.streams()
    pool = kit.pool(max_adapters=1, layers=kit.layers(8), timeline=streams, page_bytes=4096)
    adapter = kit.adapter(layers=8)
    pool.add("a", adapter)
    first, last = "layers.0.qkv", "layers.7.down"
    lease = pool.acquire(["a"], wait=False)
    lease.wait(first)
    arrived: list[bool] = []
    streams.launch(lambda: arrived.append(True))
    while not arrived:
        assert streams.step("compute") or streams.step("copy")
    views = kit.read(pool, lease.indices[0])
    assert torch.equal(views[first, 0].a[:, :20], adapter.modules["layers.0.q"].a)
    assert not torch.equal(views[last, 0].a[:, :48], adapter.modules["layers.7.down"].a)
    lease.wait(last)
    lease.wait()
    streams.drain()
    kit.assert_slot(pool, lease.indices[0], adapter)
    lease.release()


def test_layers_an_adapter_lacks_wait_for_its_entries(kit: Any) -> None:
    streams = kit.streams()
    pool = kit.pool(max_adapters=1, timeline=streams)
    pool.add("wide", kit.adapter(0))
    pool.add("q", kit.adapter(1, modules=("q",)))
    pool.acquire(["wide"]).release()
    streams.drain()
    with pool.acquire(["q"], wait=False) as lease:
        lease.wait("layers.2.down")
        ranks: list[int] = []
        entries = pool.table("layers.2.down").entries
        streams.launch(lambda: ranks.append(int(entries[lease.indices[0], 0, 4])))
        streams.drain()
    assert ranks == [0]


def test_every_stream_that_uses_a_lease_may_wait_for_it(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = kit.streams()
    pool = kit.pool(max_adapters=1, timeline=streams)
    pool.add("a", kit.adapter())
    lease = pool.acquire(["a"], wait=False)
    gates: list[tuple[str, int]] = []
    current = "first"
    monkeypatch.setattr(streams, "caller", lambda: current)
    monkeypatch.setattr(streams, "gate", lambda mark: gates.append((current, mark)))
    lease.wait()
    lease.wait()
    current = "second"
    lease.wait()
    assert [stream for stream, _ in gates] == ["first", "second"]
    assert gates[0][1] == gates[1][1]
    lease.release()
    streams.drain()


def test_a_second_lease_waits_for_a_load_under_way(kit: Any) -> None:
    streams = kit.streams()
    pool = kit.pool(max_adapters=2, timeline=streams)
    adapter = kit.adapter()
    pool.add("a", adapter)
    with pool.acquire(["a"], wait=False), pool.acquire(["a"]) as second:
        assert not pool.is_ready("a")
        result = launch_check(kit, streams, pool, second, "a", adapter)
        streams.run("compute")
        assert result == []
        streams.drain()
        assert result == [""]
        assert pool.is_ready("a")


def test_host_pages_are_not_reused_while_they_are_copied(kit: Any) -> None:
    streams = kit.streams()
    size = pool_bytes(kit)
    pool = kit.pool(max_adapters=2, timeline=streams, device_bytes=2 * size, host_bytes=2 * size)
    first = kit.adapter(0)
    pool.add("first", first)
    pool.add("other", kit.adapter(1))
    with pool.acquire(["first"]) as lease:
        result = launch_check(kit, streams, pool, lease, "first", first)
        pool.remove("first")  # its host pages are free, but the copy has not executed
        pool.add("third", kit.adapter(2))  # needs those pages: waits for the copy
    streams.drain()
    assert result == [""]
    kit.assert_slot(pool, acquire_now(pool, streams, "third"), kit.adapter(2))


def acquire_now(pool: Any, streams: Any, name: str) -> int:
    with pool.acquire([name]) as lease:
        streams.drain()
        return int(lease.indices[0])


def pool_bytes(kit: Any) -> int:
    probe = kit.pool()
    probe.add("probe", kit.adapter())
    return int(probe.info("probe").num_bytes)


def test_slots_are_cleared_when_an_adapter_leaves(kit: Any) -> None:
    streams = kit.streams()
    pool = kit.pool(max_adapters=1, timeline=streams)
    pool.add("a", kit.adapter())
    slot = acquire_now(pool, streams, "a")
    assert kit.read(pool, slot)
    pool.remove("a")
    streams.drain()
    assert kit.read(pool, slot) == {}


def test_refused_acquire_leaves_the_streams_alone(kit: Any) -> None:
    streams = kit.streams()
    pool = kit.pool(max_adapters=2, timeline=streams)
    for seed in range(3):
        pool.add(str(seed), kit.adapter(seed))
    lease = pool.acquire(["0"])
    streams.drain()
    with pytest.raises(PoolFullError):
        pool.acquire(["1", "2"])
    assert not any(streams.queues.values())
    lease.release()


def test_load_latency_runs_from_first_to_last_mark(kit: Any) -> None:
    streams = kit.streams()
    pool = kit.pool(timeline=streams)
    pool.add("a", kit.adapter())
    pool.acquire(["a"]).release()
    assert pool.stats().load_seconds.count == 0  # not there yet
    streams.drain()
    assert pool.stats().load_seconds.count == 1
    assert pool.stats().load_seconds.total > 0
