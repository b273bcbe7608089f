"""Numbers: bytes per tier, fragmentation, latencies, and their Prometheus form."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import pytest
import torch

from loraplex.adapters import LayerShape
from loraplex.pool import Latencies


def test_bytes_and_fragmentation(kit: Any) -> None:
    pool = kit.pool(max_adapters=3, page_bytes=4096)
    adapters = {"full": kit.adapter(0), "q": kit.adapter(1, modules=("q",))}
    for name, adapter in adapters.items():
        pool.add(name, adapter)
    pool.acquire(["full", "q"]).release()
    stats = pool.stats()
    # q: three layers of two [8, 24] or [20, 8] float32 matrices in one page
    live_q = 3 * (8 * 24 + 20 * 8) * 4
    live = (
        live_q + sum((8 * 24 + 12 * 8) * 4 * 2 + (8 * 48 + 20 * 8) * 4 for _ in range(3)) + live_q
    )
    assert stats.device.live == live
    assert stats.device.used == sum(pool.info(name).num_bytes for name in adapters)
    assert stats.device.fragmentation == pytest.approx(1 - live / stats.device.used)
    assert stats.largest_free_run == stats.device.reserved - stats.device.used
    assert stats.host.live == live
    assert (stats.device.adapters, stats.host.adapters, stats.disk) == (2, 2, None)
    assert (stats.loads, stats.loaded_bytes) == (2, stats.device.used)


def test_latency_histogram() -> None:
    waits = Latencies()
    assert (waits.count, waits.mean, waits.quantile(0.5)) == (0, 0.0, 0.0)
    for milliseconds in (0.1, 0.3, 3.0, 60_000.0):
        waits.add(milliseconds / 1e3)
    assert waits.count == 4
    assert waits.quantile(0.5) == 0.0005
    assert waits.quantile(1.0) == waits.longest == 60.0
    other = waits.copy()
    other.add(1.0)
    assert waits.count == 4


def test_acquire_of_64_costs_the_same_at_20_and_2000(kit: Any) -> None:
    layers = {"layers.0.q": LayerShape.plain(20, 20)}

    def shortest_acquire(registered: int) -> float:
        pool = kit.pool(max_adapters=64, layers=layers, max_rank=8, device_bytes=4 << 20)
        adapter = kit.adapter(modules=("q",), layers=1)
        for i in range(registered):
            pool.add(str(i), adapter)
        names = [str(i % registered) for i in range(64)]
        pool.acquire(names).release()
        kit.synchronize()  # nobody waits for what is still on its way
        times = []
        for _ in range(31):
            start = time.perf_counter()
            pool.acquire(names).release()
            times.append(time.perf_counter() - start)
        return min(times)  # on a machine that others use too

    few, many = shortest_acquire(20), shortest_acquire(2000)
    assert many < 1e-3
    assert many < 20 * few  # 64 distinct names against 20


def samples(pool: Any) -> dict[str, float]:
    prometheus = pytest.importorskip("prometheus_client")
    from loraplex.pool.metrics import PoolCollector

    registry = prometheus.CollectorRegistry()
    registry.register(PoolCollector(pool, pool="main"))
    return {
        f"{sample.name}{sample.labels.get('tier', sample.labels.get('le', ''))}": sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.labels["pool"] == "main"
    }


def test_prometheus_collector(kit: Any) -> None:
    pool = kit.pool(max_adapters=2)
    pool.add("secret-name", kit.adapter())
    pool.acquire(["secret-name"]).release()
    kit.synchronize()  # a load has no time until it is done
    found = samples(pool)
    stats = pool.stats()
    assert found["loraplex_pool_used_bytesdevice"] == stats.device.used
    assert found["loraplex_pool_live_byteshost"] == stats.host.live
    assert found["loraplex_pool_misses_total"] == 1
    assert found["loraplex_pool_load_seconds_count"] == 1
    assert found["loraplex_pool_load_seconds_bucket+Inf"] == 1
    assert "secret" not in str(found)  # S31: metrics name no adapter


def test_prometheus_collector_of_a_function(kit: Any) -> None:
    """As for an attached model, whose statistics have more than its pool's."""
    pool = kit.pool()
    found = samples(lambda: dataclasses.replace(pool.stats(), outside_device=7, outside_host=9))
    assert found["loraplex_pool_outside_device"] == 7
    assert found["loraplex_pool_outside_host"] == 9


def test_the_missing_extra_is_named(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex.pool.metrics import PoolCollector

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    collector = PoolCollector(kit.pool())
    with pytest.raises(ImportError, match=r"loraplex\[metrics\]"):
        list(collector.collect())


@pytest.mark.gpu
def test_loading_allocates_nothing_on_the_device(kit: Any) -> None:
    pool = kit.pool(max_adapters=2)
    for seed in range(4):
        pool.add(str(seed), kit.adapter(seed))
    pool.acquire(["0"]).release()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for seed in range(4):
        pool.acquire([str(seed)]).release()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
