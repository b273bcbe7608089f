"""A pool's numbers for Prometheus (the ``metrics`` extra)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from loraplex.pool.stats import LATENCY_BOUNDS, Latencies, PoolStats

if TYPE_CHECKING:
    from loraplex.pool.pool import AdapterPool

GAUGES = {
    "registered": "Adapters that can be acquired",
    "resident": "Adapters on the device",
    "leased": "Adapters that leases hold",
    "retired": "Removed or replaced versions that leases still hold",
    "leases": "Leases that were not released",
    "slots": "Adapter slots of the tables",
    "largest_free_run": "Bytes of the longest run of free device pages",
    "outside_host": "Host bytes of adapters beside the tiers (embeddings, whole modules)",
    "outside_device": "Device bytes of adapters beside the tiers",
}
COUNTERS = {
    "hits": "Adapters acquired that were on the device",
    "misses": "Adapters acquired that were not on the device",
    "evictions": "Adapters that left the device for others",
    "spills": "Adapters written from host memory to disk",
    "disk_reads": "Adapters read from disk",
    "loads": "Copies from host memory to the device",
    "loaded_bytes": "Bytes of those copies",
}
TIER_BYTES = {
    "reserved": "Bytes a tier takes",
    "used": "Bytes in pages that hold adapters",
    "live": "Bytes of weights",
}


class PoolCollector:
    """Yields a pool's statistics whenever Prometheus asks; names of adapters never appear.

    Args:
        pool: what to report on, or a function that returns its statistics: the ``adapter_stats``
            of an attached model.
        labels: put on every sample, for processes with several pools.

    Example:
        .. code-block:: python

            prometheus_client.REGISTRY.register(PoolCollector(pool, pool="main"))
    """

    def __init__(self, pool: AdapterPool | Callable[[], PoolStats], /, **labels: str) -> None:
        self._read = pool if callable(pool) else pool.stats
        self._names = list(labels)
        self._values = list(labels.values())

    def describe(self) -> list[Any]:
        """Nothing: registering must not take the pool's lock."""
        return []

    def collect(self) -> Iterator[Any]:
        """One metric family after the other.

        Raises:
            ImportError: prometheus_client is not installed.
        """
        try:
            from prometheus_client import core
        except ImportError as error:
            raise ImportError(
                "the Prometheus collector needs prometheus_client: pip install 'loraplex[metrics]'"
            ) from error
        stats = self._read()
        for name, text in GAUGES.items():
            gauge = core.GaugeMetricFamily(f"loraplex_pool_{name}", text, labels=self._names)
            gauge.add_metric(self._values, getattr(stats, name))
            yield gauge
        for name, text in COUNTERS.items():
            counter = core.CounterMetricFamily(f"loraplex_pool_{name}", text, labels=self._names)
            counter.add_metric(self._values, getattr(stats, name))
            yield counter
        yield from self._tiers(core, stats)
        yield self._histogram(core, "load", "Host to device", stats.load_seconds)
        yield self._histogram(core, "disk", "Disk to host", stats.disk_seconds)

    def _tiers(self, core: Any, stats: PoolStats) -> Iterator[Any]:
        labels = [*self._names, "tier"]
        for name, text in TIER_BYTES.items():
            gauge = core.GaugeMetricFamily(f"loraplex_pool_{name}_bytes", text, labels=labels)
            for tier in ("device", "host", "disk"):
                found = getattr(stats, tier)
                if found is not None:
                    gauge.add_metric([*self._values, tier], getattr(found, name))
            yield gauge

    def _histogram(self, core: Any, name: str, text: str, latencies: Latencies) -> Any:
        family = core.HistogramMetricFamily(
            f"loraplex_pool_{name}_seconds", f"{text}, in seconds", labels=self._names
        )
        seen, buckets = 0, []
        for bound, count in zip((*map(str, LATENCY_BOUNDS), "+Inf"), latencies.counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family.add_metric(self._values, buckets, latencies.total)
        return family
