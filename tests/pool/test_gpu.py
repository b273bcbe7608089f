"""What only a real device shows: pinned memory, two streams, captured graphs, no host waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import loraplex as lp

pytestmark = pytest.mark.gpu
LAYER, ROWS = "layers.1.down", 16


@pytest.fixture(autouse=True)
def _no_sync_debug() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


class Layer:
    """One layer's base weight and input, and what an adapter makes of them in float64."""

    def __init__(self, kit: Any, pool: Any) -> None:
        self.pool = pool
        shape = pool.layers[LAYER]
        draw = torch.Generator(device=pool.device).manual_seed(3)
        options = {"dtype": pool.dtype, "device": pool.device, "generator": draw}
        self.x = torch.randn(ROWS, shape.in_features, **options)
        self.weight = torch.randn(shape.out_features, shape.in_features, **options)
        self.routing = lp.Routing.allocate(ROWS, num_adapters=pool.max_adapters, device=pool.device)

    def route(self, index: int) -> None:
        self.routing.update_([index] * ROWS)

    def run(self) -> torch.Tensor:
        return lp.lora_linear(self.x, self.weight, self.pool.table(LAYER), self.routing)

    def want(self, adapter: Any) -> torch.Tensor:
        module = adapter.modules[LAYER]
        x, weight = self.x.double(), self.weight.double()
        a, b = (t.to(self.pool.dtype).to(x.device).double() for t in (module.a, module.b))
        return x @ weight.T + module.scaling * (x @ a.T) @ b.T

    def assert_is(self, y: torch.Tensor, adapter: Any) -> None:
        want = self.want(adapter)
        # any other adapter is off by about one; fp16 by about a thousandth
        assert (y.double() - want).norm() / want.norm() < 1e-2


def test_host_memory_is_pinned(kit: Any) -> None:
    pool = kit.pool()
    pool.add("a", kit.adapter())
    assert pool._roster.backing.host.view(0, 1).is_pinned()


def test_a_queued_step_keeps_its_weights(kit: Any) -> None:
    pool = kit.pool(max_adapters=1, dtype=torch.float16)
    adapters = [kit.adapter(seed) for seed in range(6)]
    for seed, adapter in enumerate(adapters):
        pool.add(str(seed), adapter)
    layer = Layer(kit, pool)
    layer.route(0)
    layer.run()  # compile before the clock matters
    torch.cuda.synchronize()
    results = []
    for seed in range(len(adapters)):
        with pool.acquire([str(seed)]):
            torch.cuda._sleep(20_000_000)  # the step starts long after the host has gone on
            results.append(layer.run())
    torch.cuda.synchronize()
    for y, adapter in zip(results, adapters, strict=True):
        layer.assert_is(y, adapter)


def test_a_captured_graph_sees_adapters_come_and_go(kit: Any) -> None:
    pool = kit.pool(max_adapters=2, dtype=torch.float16)
    adapters = [kit.adapter(seed, rank=8 + 8 * seed) for seed in range(4)]
    for seed, adapter in enumerate(adapters):
        pool.add(str(seed), adapter)
    layer = Layer(kit, pool)
    with pool.acquire(["0"]) as lease:
        layer.route(lease.indices[0])
        layer.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.run()
    for seed in (0, 1, 2, 3, 1, 0):
        with pool.acquire([str(seed)]) as lease:
            layer.route(lease.indices[0])
            graph.replay()
            result = y.clone()
        layer.assert_is(result, adapters[seed])
    pool.add("0", adapters[2], replace=True)
    with pool.acquire(["0"]) as lease:
        layer.route(lease.indices[0])
        graph.replay()
        layer.assert_is(y, adapters[2])


def test_the_host_never_waits_for_the_device(kit: Any) -> None:
    pool = kit.pool(max_adapters=2)
    for seed in range(4):
        pool.add(str(seed), kit.adapter(seed))
    pool.acquire(["0"]).release()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second: the host may be slow, too
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    for seed in (1, 2, 3, 0):
        with pool.acquire([str(seed)], wait=False) as lease:
            lease.wait(LAYER)
    pool.stats()
    torch.cuda.set_sync_debug_mode("default")
    assert not busy.query(), "acquire came back only after the device was done"
    torch.cuda.synchronize()
    kit.assert_serves(pool, "0", kit.adapter(0))


def test_first_layer_arrives_before_the_last(kit: Any) -> None:
    pool = kit.pool(max_adapters=1, layers=kit.layers(8), page_bytes=4096)
    adapter = kit.adapter(layers=8)
    pool.add("a", adapter)
    lease = pool.acquire(["a"], wait=False)
    lease.wait("layers.0.qkv")
    torch.cuda.current_stream().synchronize()
    view = kit.read(pool, lease.indices[0])["layers.0.qkv", 0]
    assert torch.equal(view.a[:, :20], adapter.modules["layers.0.q"].a)
    lease.wait()
    torch.cuda.synchronize()
    kit.assert_slot(pool, lease.indices[0], adapter)
    lease.release()


def test_a_pool_may_go_away_while_it_loads(kit: Any) -> None:
    for seed in range(3):
        pool = kit.pool(max_adapters=2)
        pool.add("a", kit.adapter(seed))
        pool.acquire(["a"], wait=False).release()
        kit.pools.remove(pool)
        pool.close()
        del pool
        filled = torch.full((1 << 20,), 7, dtype=torch.uint8, device=kit.device)
        torch.cuda.synchronize()
        assert bool((filled == 7).all())
