"""Adapters in device memory: who is there, who has to leave, and the copies between the tiers."""

from loraplex.pool.lease import Lease
from loraplex.pool.pool import AdapterPool
from loraplex.pool.report import AdapterInfo
from loraplex.pool.stats import LATENCY_BOUNDS, Latencies, PoolStats, TierStats

__all__ = [
    "AdapterInfo",
    "AdapterPool",
    "LATENCY_BOUNDS",
    "Latencies",
    "Lease",
    "PoolStats",
    "TierStats",
]
