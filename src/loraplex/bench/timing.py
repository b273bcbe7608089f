"""Timers: one call at a time, and CUDA-graph replay; every number is a median with its spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

# A replay shorter than this is mostly launch latency of the graph itself.
MIN_CALLS_PER_GRAPH = 24


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Median and percentiles of samples in milliseconds.

        Example:
            >>> Timing.of([float(ms) for ms in range(11)])
            Timing(median=5.0, p20=2.0, p80=8.0)
        """
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0])
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), deciles[1], deciles[7])

    def __add__(self, other: Timing) -> Timing:
        return Timing(self.median + other.median, self.p20 + other.p20, self.p80 + other.p80)


def time_events(calls: Sequence[Call], *, warmup: int, repeat: int) -> Timing:
    """Time calls one by one between two CUDA events, launch latency included.

    Args:
        calls: the same work on different buffers, used in turn so that weights come from memory.
    """
    for number in range(warmup):
        calls[number % len(calls)]()
    torch.cuda.synchronize()
    pairs = []
    for number in range(repeat):
        start, end = _event(), _event()
        start.record()
        calls[number % len(calls)]()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return Timing.of([start.elapsed_time(end) for start, end in pairs])


def time_graph(calls: Sequence[Call], *, warmup: int, repeat: int) -> Timing:
    """Time calls inside one captured CUDA graph: what a serving engine sees at decode."""
    graph, count = capture(calls)
    for _ in range(max(1, warmup // count)):
        graph.replay()
    torch.cuda.synchronize()
    samples = []
    for _ in range(repeat):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / count)
    return Timing.of(samples)


def capture(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of enough rounds of the calls, and how many calls it holds."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    rounds = max(1, MIN_CALLS_PER_GRAPH // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph, rounds * len(calls)


def time_host(calls: Sequence[Call], *, warmup: int, repeat: int) -> Timing:
    """Time calls on the CPU with the host's clock."""
    for number in range(warmup):
        calls[number % len(calls)]()
    samples = []
    for number in range(repeat):
        start = time.perf_counter()
        calls[number % len(calls)]()
        samples.append((time.perf_counter() - start) * 1e3)
    return Timing.of(samples)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
