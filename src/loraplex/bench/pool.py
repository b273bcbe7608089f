"""What a pool costs: loading over the host link, acquiring by name, bytes, and a busy neighbour.

``python -m loraplex.bench.pool`` measures on the GPU and prints one table; ``--json FILE`` keeps
the numbers. ``--quick`` takes small sizes, on the CPU if need be, to show that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import loraplex as lp
from loraplex.adapters import Adapter, AdapterSpec, LayerShape, ModuleLora
from loraplex.bench.header import make_header
from loraplex.bench.pool_decode import Decode

ROUNDS = 5
"""How often the cases of a throughput take turns."""

ALONE = "nothing loading"

NO_GPU = "No GPU here, so the sizes are small and the times say nothing about a GPU.\n"


@dataclass(frozen=True)
class Sizes:
    """A Llama-shaped model, and how much to do with it.

    Attributes:
        hidden, kv, mlp, layers: widths and depth; rows: M of a decode step.
        scale: divisor of the widths where thousands of adapters have to fit in host memory.
        registered: numbers of registered adapters; residents: numbers of resident adapters.
        repeat: samples per figure; steps: decode steps per throughput sample.
    """

    hidden: int
    kv: int
    mlp: int
    layers: int
    rows: int
    scale: int
    registered: tuple[int, int]
    residents: tuple[int, ...]
    repeat: int
    steps: int

    def shapes(self, scale: int = 1) -> dict[str, LayerShape]:
        """The packed layers of the model, in the order in which they run."""
        hidden, kv, mlp = self.hidden // scale, self.kv // scale, self.mlp // scale
        block = {
            "self_attn.qkv_proj": LayerShape(
                hidden, (hidden, kv, kv), ("q_proj", "k_proj", "v_proj")
            ),
            "self_attn.o_proj": LayerShape.plain(hidden, hidden),
            "mlp.gate_up_proj": LayerShape(hidden, (mlp, mlp), ("gate_proj", "up_proj")),
            "mlp.down_proj": LayerShape.plain(mlp, hidden),
        }
        return {
            f"model.layers.{i}.{name}": shape
            for i in range(self.layers)
            for name, shape in block.items()
        }


LLAMA_8B = Sizes(4096, 1024, 14336, 32, 64, 16, (20, 2000), (8, 16, 32, 64), 30, 100)
QUICK = Sizes(64, 16, 128, 2, 8, 1, (20, 100), (2, 4), 5, 4)


@dataclass(frozen=True)
class Figure:
    """One number; ``most`` is what it should not exceed, None where it is only reported."""

    name: str
    value: float
    unit: str
    most: float | None = None
    detail: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the number is within its limit."""
        return self.most is None or self.value <= self.most


def make_adapter(shapes: dict[str, LayerShape], rank: int, dtype: torch.dtype) -> Adapter:
    """A random adapter of one rank for all slices of all layers."""
    modules = {}
    for layer, shape in shapes.items():
        parent, _, last = layer.rpartition(".")
        for member, width in zip(shape.members, shape.slices, strict=True):
            name = f"{parent}.{member or last}"
            a = torch.randn(rank, shape.in_features, dtype=dtype) / shape.in_features**0.5
            b = torch.randn(width, rank, dtype=dtype) / rank**0.5
            modules[name] = ModuleLora(name, a, b, scaling=0.5)
    return Adapter(AdapterSpec(r=rank), modules)


def weight_bytes(adapter: Adapter) -> int:
    """Bytes of all A and B."""
    return sum(module.a.nbytes + module.b.nbytes for module in adapter.modules.values())


def measure_loading(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Figure]:
    """Pinned host memory to device-ready, against one plain copy of the same bytes."""
    shapes = sizes.shapes()
    adapter = make_adapter(shapes, 16, dtype)
    with lp.AdapterPool(shapes, max_adapters=2, dtype=dtype, device=device, max_rank=16) as pool:
        names = [f"adapter-{i}" for i in range(4)]
        for name in names:
            pool.add(name, adapter)
        num_bytes = weight_bytes(adapter)
        link = median_seconds(_raw_copy(num_bytes, device), sizes.repeat, device)
        turn = iter(names * (sizes.repeat + 3))

        def load(layer: str | None) -> Callable[[], object]:
            def run() -> None:
                with pool.acquire([next(turn)], wait=False) as lease:
                    lease.wait(layer)

            return run

        ready = median_seconds(load(None), sizes.repeat, device)
        turn = iter(names * (sizes.repeat + 3))
        first = _first_layer_seconds(pool, turn, next(iter(shapes)), sizes.repeat)
        _check_weights(pool, names[0], adapter)
        copies = pool.stats().load_seconds
    detail = f"{num_bytes / 1e6:.1f} MB, rank 16"
    yield Figure("one plain copy", link * 1e3, "ms", detail=f"{num_bytes / link / 1e9:.1f} GB/s")
    yield Figure("acquire to device-ready", ready * 1e3, "ms", detail=detail)
    yield Figure("device-ready over plain copy", ready / link, "x", 1.3)
    yield Figure("acquire to first layer ready", first * 1e3, "ms")
    yield Figure("copies on the copy stream, mean", copies.mean * 1e3, "ms")


def measure_acquire(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Figure]:
    """Host time of one step's acquire and release, with few and with many names registered."""
    shapes = sizes.shapes(sizes.scale)
    adapter = make_adapter(shapes, 16, dtype)
    for registered in sizes.registered:
        with lp.AdapterPool(
            shapes, max_adapters=64, dtype=dtype, device=device, max_rank=16
        ) as pool:
            for i in range(registered):
                pool.add(str(i), adapter)
            step = [str(i % registered) for i in range(64)]
            seconds = _host_seconds(pool, [step], sizes.repeat * 4)
            label = f"acquire 64 of {registered}"
            yield Figure(f"{label}, all resident", seconds * 1e3, "ms", 1.0)
            if registered > 64:
                turns = [step[:62] + [str(i), str(i + 1)] for i in range(62, registered - 1, 2)]
                seconds = _host_seconds(pool, turns, sizes.repeat)
                yield Figure(f"{label}, 2 not resident", seconds * 1e3, "ms")


def measure_bytes(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Figure]:
    """Device bytes of resident rank-8 adapters in a pool that takes rank 64, against their own."""
    shapes = sizes.shapes()
    adapter = make_adapter(shapes, 8, dtype)
    own = weight_bytes(adapter)
    most = max(sizes.residents)
    with lp.AdapterPool(shapes, max_adapters=most, dtype=dtype, device=device, max_rank=64) as pool:
        for i in range(most):
            pool.add(str(i), adapter)
        for count in sizes.residents:
            with pool.acquire([str(i) for i in range(count)]):
                used = pool.stats().device.used
            detail = f"{used / 1e6:.1f} MB; padded to rank 64 {8 * count * own / 1e6:.1f} MB"
            yield Figure(f"{count} of rank 8, bytes", used / (count * own), "x", 1.01, detail)


def measure_streaming(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Figure]:
    """Decode steps per second of a mixed batch, alone and while other adapters come and go.

    ``back to back`` is the worst there can be: the next load is on the copy stream before the last
    one has arrived, so the host link is saturated all the time, and so many bytes per second are
    written to the memory that the step reads. The three cases take turns, so that a device that
    gets slower or faster meanwhile changes all of them.
    """
    shapes = sizes.shapes()
    adapter = make_adapter(shapes, 16, dtype)
    with lp.AdapterPool(shapes, max_adapters=12, dtype=dtype, device=device, max_rank=16) as pool:
        names = [f"resident-{i}" for i in range(8)]
        visitors = [f"visitor-{i}" for i in range(16)]
        for name in (*names, *visitors):
            pool.add(name, adapter)
        for name in names:
            pool.pin(name)
        decode = Decode(pool, names, rows=sizes.rows)
        steps = sizes.steps
        cases: dict[str, Callable[[], tuple[float, float]]] = {
            ALONE: lambda: decode.sample(steps),
            "one new adapter in 4 steps": lambda: decode.sample_with_prefetch(steps, visitors, 4),
            "back to back": lambda: decode.sample_back_to_back(steps, visitors),
        }
        samples: dict[str, list[tuple[float, float]]] = {label: [] for label in cases}
        for _ in range(ROUNDS):
            for label, case in cases.items():
                samples[label].append(case())
        alone = statistics.median(rate for rate, _ in samples.pop(ALONE))
        yield Figure("decode steps, nothing loading", alone, "/s", detail=f"M = {sizes.rows}")
        for label, found in samples.items():
            busy, arriving = (statistics.median(part) for part in zip(*found, strict=True))
            detail = f"{busy:.1f} steps/s, {arriving / 1e9:.2f} GB/s arriving"
            yield Figure(f"slower while loading, {label}", alone / busy, "x", 1.05, detail)
        _check_weights(pool, names[0], adapter)


def median_seconds(call: Callable[[], object], repeat: int, device: torch.device) -> float:
    """Host time from the call to the end of what it put on the device."""
    samples = []
    for _ in range(repeat + 2):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[2:])


def _first_layer_seconds(
    pool: lp.AdapterPool, turn: Iterator[str], layer: str, repeat: int
) -> float:
    """Host time from acquire until the current stream has passed the wait for one layer."""
    samples = []
    for _ in range(repeat):
        _synchronize(pool.device)
        start = time.perf_counter()
        with pool.acquire([next(turn)], wait=False) as lease:
            lease.wait(layer)
            if pool.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _host_seconds(pool: lp.AdapterPool, steps: Sequence[Sequence[str]], repeat: int) -> float:
    """Host time of acquire and release, taking the steps in turn."""
    samples = []
    for i in range(repeat + 2):
        _synchronize(pool.device)
        start = time.perf_counter()
        pool.acquire(steps[i % len(steps)]).release()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[2:])


def _raw_copy(num_bytes: int, device: torch.device) -> Callable[[], object]:
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return lambda: target.copy_(source, non_blocking=True)


def _check_weights(pool: lp.AdapterPool, name: str, adapter: Adapter) -> None:
    """Refuse numbers of a pool whose weights are not the adapter's."""
    layer = next(name for name, shape in pool.layers.items() if len(shape.slices) == 1)
    module = adapter.modules[layer]
    x = torch.randn(4, module.in_features, dtype=pool.dtype, device=pool.device)
    with pool.acquire([name]) as lease:
        routing = lp.Routing.from_indices(
            lease.indices * 4, num_adapters=pool.max_adapters, device=pool.device
        )
        y = torch.zeros(4, module.out_features, dtype=pool.dtype, device=pool.device)
        lp.add_lora_(y, x, pool.table(layer), routing, impl="torch")
    a, b = (t.to(pool.device).double() for t in (module.a, module.b))
    want = module.scaling * (x.double() @ a.T) @ b.T
    error = float((y.double() - want).norm() / want.norm())
    if not error < 2e-2:
        raise lp.LoraplexError(f"the pool's weights are wrong, relative error {error:.2g}")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(sizes: Sizes, device: torch.device, *, has_limits: bool) -> list[Figure]:
    """All figures, printed as they come; bfloat16 on a GPU, float32 elsewhere."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    parts = (measure_loading, measure_acquire, measure_bytes, measure_streaming)
    figures = []
    for part in parts:
        for figure in part(sizes, device, dtype):
            figures.append(figure if has_limits else replace(figure, most=None))
            print(as_row(figures[-1]), flush=True)
    return figures


def as_row(figure: Figure) -> str:
    """A line of the table."""
    limit = "" if figure.most is None else f"<= {figure.most:g}"
    verdict = "" if figure.most is None else ("met" if figure.is_met else "MISSED")
    return (
        f"{figure.name:<46} {figure.value:>10.4g} {figure.unit:<3} {limit:<8} {verdict:<7}"
        f"{figure.detail}"
    ).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 if a limit is missed. Quick mode has no limits."""
    parser = argparse.ArgumentParser(prog="python -m loraplex.bench.pool", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, to show that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    options = parser.parse_args(arguments)
    has_gpu = torch.cuda.is_available()
    is_quick = options.quick or not has_gpu
    if not has_gpu:
        print(NO_GPU)
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    header = make_header(["python", "-m", "loraplex.bench.pool", *sys.argv[1:]])
    print(" · ".join(f"{key} {header[key]}" for key in ("device", "driver", "torch", "commit")))
    print(f"mode {'quick' if is_quick else 'full'}\n")
    figures = measure(QUICK if is_quick else LLAMA_8B, device, has_limits=not is_quick)
    if options.json:
        rows = [asdict(figure) | {"is_met": figure.is_met} for figure in figures]
        content = {"header": header, "mode": "quick" if is_quick else "full", "figures": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
        print(f"\nwrote {options.json}")
    return 0 if all(figure.is_met for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
