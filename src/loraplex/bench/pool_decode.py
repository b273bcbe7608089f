"""A decode step beside a pool that loads: what the benchmark of the pool times."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

import loraplex as lp


class Decode:
    """The layers of a decode step on random weights; on a GPU as one captured graph.

    Args:
        pool: with the layers of the model.
        names: adapters that the rows use in turn, resident and pinned.
        rows: M of the step.
    """

    def __init__(self, pool: lp.AdapterPool, names: Sequence[str], *, rows: int) -> None:
        self.pool = pool
        self.names = [names[i % len(names)] for i in range(rows)]
        device, dtype = pool.device, pool.dtype
        self.weights = {
            layer: torch.randn(shape.out_features, shape.in_features, dtype=dtype, device=device)
            for layer, shape in pool.layers.items()
        }
        widths = {shape.in_features for shape in pool.layers.values()}
        self.inputs = {k: torch.randn(rows, k, dtype=dtype, device=device) for k in widths}
        self.routing = lp.Routing.allocate(rows, num_adapters=pool.max_adapters, device=device)
        self._replay: Callable[[], object] = self.forward
        with pool.acquire(self.names) as lease:
            self.routing.update_(lease.indices)
            self.forward()
            if device.type == "cuda":
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.forward()
                self._replay = graph.replay

    def forward(self) -> None:
        """Every layer once."""
        impl = "auto" if self.pool.device.type == "cuda" else "torch"
        for layer, weight in self.weights.items():
            x = self.inputs[weight.shape[1]]
            lp.lora_linear(x, weight, self.pool.table(layer), self.routing, impl=impl)

    def sample(
        self, steps: int, before_step: Callable[[int], object] | None = None
    ) -> tuple[float, float]:
        """Steps per second with one host round trip each, as a sampler makes it.

        Args:
            steps: how many to time.
            before_step: called with the number of each step before it.

        Returns:
            Steps, and bytes that the pool began to load, per second.
        """
        loaded = self.pool.stats().loaded_bytes
        start = time.perf_counter()
        for step in range(steps):
            if before_step is not None:
                before_step(step)
            self.step()
        seconds = time.perf_counter() - start
        return steps / seconds, (self.pool.stats().loaded_bytes - loaded) / seconds

    def sample_with_prefetch(
        self, steps: int, visitors: Sequence[str], every: int
    ) -> tuple[float, float]:
        """The same while one adapter is asked for every so many steps, in turn."""
        loads: list[Future[None]] = []

        def ask(step: int) -> None:
            if step % every == 0:
                loads.append(self.pool.prefetch([visitors[len(loads) % len(visitors)]]))

        rates = self.sample(steps, ask)
        for load in loads:
            load.result()
        return rates

    def sample_back_to_back(self, steps: int, visitors: Sequence[str]) -> tuple[float, float]:
        """The same while another thread keeps two loads on the copy stream."""
        stop = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            streaming = thread.submit(self._stream, visitors, stop)
            try:
                rates = self.sample(steps)
            finally:
                stop.set()
            streaming.result()
        return rates

    def step(self) -> None:
        """Acquire, route, run, release, and wait for the result."""
        with self.pool.acquire(self.names) as lease:
            self.routing.update_(lease.indices)
            self._replay()
        if self.pool.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _stream(self, visitors: Sequence[str], stop: threading.Event) -> None:
        last = None
        for name in itertools.cycle(visitors):
            if stop.is_set():
                break
            self.pool.prefetch([name]).result()
            while last is not None and not (self.pool.is_ready(last) or stop.is_set()):
                time.sleep(2e-4)
            last = name
