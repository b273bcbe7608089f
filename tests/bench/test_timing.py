"""Timers and what is derived from times."""

from __future__ import annotations

import time

import pytest
import torch

from loraplex.bench.ceilings import Ceilings, measure_ceilings
from loraplex.bench.timing import (
    MIN_CALLS_PER_GRAPH,
    Timing,
    capture,
    time_events,
    time_graph,
    time_host,
)


def test_percentiles_do_not_depend_on_order() -> None:
    assert Timing.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Timing.of([1.0, 2.0, 3.0, 4.0, 5.0])


def test_one_outlier_moves_neither_median_nor_percentiles() -> None:
    steady = Timing.of([1.0] * 20)
    assert Timing.of([1.0] * 19 + [1000.0]) == steady == Timing(1.0, 1.0, 1.0)


@pytest.mark.parametrize("samples", [[0.1], [0.3, 0.1], [0.1, 0.1, 0.3], [0.7, 0.2, 0.9, 0.4]])
def test_percentiles_surround_the_median(samples: list[float]) -> None:
    timing = Timing.of(samples)
    assert min(samples) <= timing.p20 <= timing.median <= timing.p80 <= max(samples)


def test_sum() -> None:
    assert Timing(1, 0.5, 2) + Timing(10, 9, 11) == Timing(11, 9.5, 13)


def test_host_timer_measures_time_and_rotates() -> None:
    order: list[int] = []
    calls = [lambda i=i: (order.append(i), time.sleep(0.01)) for i in range(3)]
    timing = time_host(calls, warmup=2, repeat=4)
    assert order == [0, 1, 0, 1, 2, 0]
    assert timing.p20 >= 10
    assert timing.median < 200


def test_floor_is_the_slower_of_bytes_and_flops() -> None:
    ceilings = Ceilings(bytes_per_second=1e12, flops_per_second=1e15)
    assert ceilings.floor_ms(num_bytes=1e9, flops=1e11) == pytest.approx(1.0)
    assert ceilings.floor_ms(num_bytes=1e6, flops=2e12) == pytest.approx(2.0)


@pytest.mark.gpu
def test_event_timer_rotates() -> None:
    order: list[int] = []
    calls = [lambda i=i: order.append(i) for i in range(3)]
    timing = time_events(calls, warmup=2, repeat=4)
    assert order == [0, 1, 0, 1, 2, 0]
    assert 0 <= timing.p20 <= timing.median <= timing.p80


@pytest.mark.gpu
def test_gpu_timers_agree_on_long_work(device: torch.device) -> None:
    """Other programs may take turns on the GPU with this one, for as long as the test runs.

    Both timers get the same work, as long as a turn, from an idle start: so both meet the others.
    """
    x = torch.randn(4096, 4096, device=device, dtype=torch.float16)

    def work() -> None:
        for _ in range(MIN_CALLS_PER_GRAPH):
            x @ x

    ratios = []
    for _ in range(10):
        samples = [time_events([work], warmup=0, repeat=1).median for _ in range(21)]
        graph = time_graph([lambda: x @ x], warmup=5, repeat=20)
        # the first sample may load what the others find
        events = Timing.of(samples[1:]).median / MIN_CALLS_PER_GRAPH
        ratios.append(graph.median / events)
        if 0.5 < ratios[-1] < 1.2:
            return
    raise AssertionError(f"time in a graph over time between events: {ratios}")


@pytest.mark.gpu
def test_capture_counts_its_calls(device: torch.device) -> None:
    counter = torch.zeros(1, device=device)
    graph, count = capture([lambda: counter.add_(1)] * 5)
    counter.zero_()
    graph.replay()
    assert int(counter) == count >= 24 - 4


@pytest.mark.gpu
def test_ceilings_are_those_of_a_gpu(device: torch.device) -> None:
    ceilings = measure_ceilings(device, torch.float16)
    assert 1e11 < ceilings.bytes_per_second < 5e13
    assert 1e12 < ceilings.flops_per_second < 1e16
