"""A small model's layers, adapters for it, and a look into the device's memory."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex import AdapterPool
from loraplex.adapters import Adapter, AdapterSpec, LayerShape, ModuleLora
from loraplex.table import (
    A_PTR,
    A_STRIDE,
    B_PTR,
    B_STRIDE,
    BIAS_PTR,
    COLUMN_SCALE_PTR,
    RANK,
    SCALING,
)

HIDDEN, MIDDLE = 20, 48
MODULES = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, 12), "v": (HIDDEN, 12), "down": (MIDDLE, HIDDEN)}


def make_layers(count: int = 3) -> dict[str, LayerShape]:
    layers: dict[str, LayerShape] = {}
    for i in range(count):
        layers[f"layers.{i}.qkv"] = LayerShape(HIDDEN, (HIDDEN, 12, 12), ("q", "k", "v"))
        layers[f"layers.{i}.down"] = LayerShape.plain(MIDDLE, HIDDEN)
    return layers


def make_adapter(
    seed: int = 0,
    rank: int = 8,
    modules: tuple[str, ...] = ("q", "k", "v", "down"),
    layers: int = 3,
    dtype: torch.dtype = torch.float32,
    scaling: float = 0.5,
    path: str = "",
    **extra: Callable[[int], Tensor],
) -> Adapter:
    """An adapter whose values depend on the seed; ``extra`` makes vectors from a width."""
    draw = torch.Generator().manual_seed(seed)
    found: dict[str, ModuleLora] = {}
    for i in range(layers):
        for module in modules:
            in_features, width = MODULES[module]
            name = f"layers.{i}.{module}"
            found[name] = ModuleLora(
                name,
                torch.randn(rank, in_features, generator=draw).to(dtype),
                torch.randn(width, rank, generator=draw).to(dtype),
                scaling,
                **{key: make(width) for key, make in extra.items()},
            )
    return Adapter(AdapterSpec(r=max(rank, 1)), found, path=path)


@dataclass
class SliceView:
    """What the table says of one slot of one slice, with the memory that it points to."""

    a: Tensor
    b: Tensor
    scaling: float
    column_scale: Tensor | None
    bias: Tensor | None


def read_slot(pool: AdapterPool, slot: int) -> dict[tuple[str, int], SliceView]:
    """Follow the pointers of one slot, layer by layer; empty slices are left out."""
    if pool.device.type == "cuda":
        torch.cuda.synchronize()
    return {
        (layer, s): view
        for layer, shape in pool.layers.items()
        for s in range(len(shape.slices))
        if (view := _read_slice(pool, layer, slot, s)) is not None
    }


def _read_slice(pool: AdapterPool, layer: str, slot: int, s: int) -> SliceView | None:
    table, shape = pool.table(layer), pool.layers[layer]
    record = table.entries[slot, s].tolist()
    if not any(record[field] for field in (A_PTR, B_PTR, RANK, COLUMN_SCALE_PTR, BIAS_PTR)):
        return None
    (arena,) = table.storages
    arena = arena.reshape(-1)

    def matrix(pointer: int, rows: int, stride: int, columns: int) -> Tensor:
        assert pointer % 16 == 0
        start = pointer - arena.data_ptr()
        memory = arena[start : start + rows * stride * table.dtype.itemsize].view(table.dtype)
        return memory.view(rows, stride)[:, :columns].cpu()

    def vector(pointer: int) -> Tensor | None:
        if pointer == 0:
            return None
        start = pointer - arena.data_ptr()
        return arena[start : start + 4 * shape.slices[s]].view(torch.float32).cpu()

    rank = record[RANK]
    empty = torch.zeros(0, table.dtype.itemsize, dtype=table.dtype)
    has_matrices = rank > 0
    return SliceView(
        a=matrix(record[A_PTR], rank, record[A_STRIDE], record[A_STRIDE])
        if has_matrices
        else empty,
        b=matrix(record[B_PTR], shape.slices[s], record[B_STRIDE], rank) if has_matrices else empty,
        scaling=struct.unpack("<f", struct.pack("<I", record[SCALING]))[0],
        column_scale=vector(record[COLUMN_SCALE_PTR]),
        bias=vector(record[BIAS_PTR]),
    )


def mismatch(pool: AdapterPool, slot: int, adapter: Adapter) -> str:
    """Where a slot differs from an adapter, zero padding included; "" if nowhere."""
    views = read_slot(pool, slot)
    expected: set[tuple[str, int]] = set()
    for layer, shape in pool.layers.items():
        parent, _, last = layer.rpartition(".")
        for s, member in enumerate(shape.members):
            module = adapter.modules.get(f"{parent}.{member or last}")
            if module is None:
                continue
            expected.add((layer, s))
            view = views.get((layer, s))
            if view is None:
                return f"{layer}[{s}] is empty"
            rank, in_features = module.a.shape
            want_a, want_b = torch.zeros_like(view.a), torch.zeros_like(view.b)
            if view.a.shape[0] != -(-rank // 8) * 8:
                return f"{layer}[{s}] has rank {view.a.shape[0]}, not {rank} rounded up to 8"
            want_a[:rank, :in_features] = module.a.to(pool.dtype)
            want_b[:, :rank] = module.b.to(pool.dtype)
            if not (torch.equal(view.a, want_a) and torch.equal(view.b, want_b)):
                return f"{layer}[{s}] has other weights"
            if view.scaling != module.scaling:
                return f"{layer}[{s}] has scaling {view.scaling}, not {module.scaling}"
    extra = set(views) - expected
    return f"{extra} are not empty" if extra else ""


class Streams:
    """A timeline with two streams that only move when the test says so.

    The copy stream executes what the pool enqueues, the compute stream what :meth:`launch` does;
    marks are reached and waits are kept exactly in order, as on a GPU. Host memory is read when a
    copy executes, not when it is enqueued.
    """

    def __init__(self, *, may_synchronize: bool = True) -> None:
        self.queues: dict[str, deque[Any]] = {"copy": deque(), "compute": deque()}
        self.reached: set[int] = set()
        self.timed: set[int] = set()
        self.may_synchronize = may_synchronize
        self._marks = 0

    def step(self, stream: str) -> bool:
        """Execute one operation; False if the stream is empty or waits for a mark."""
        queue = self.queues[stream]
        if not queue:
            return False
        kind, *rest = queue[0]
        if kind == "wait" and rest[0] not in self.reached:
            return False
        queue.popleft()
        if kind == "mark":
            self.reached.add(rest[0])
        elif kind == "run":
            rest[0]()
        return True

    def run(self, stream: str, count: int = 1 << 30) -> None:
        """Execute until the stream is empty or waits, or ``count`` operations."""
        while count > 0 and self.step(stream):
            count -= 1

    def drain(self) -> None:
        """Execute everything."""
        while self.step("copy") or self.step("compute"):
            pass
        assert not any(self.queues.values()), "the streams wait for each other"

    def launch(self, kernel: Callable[[], None]) -> None:
        """Put work on the compute stream."""
        self.queues["compute"].append(("run", kernel))

    def _mark_on(self, stream: str) -> int:
        self._marks += 1
        self.queues[stream].append(("mark", self._marks))
        return self._marks

    def adopt(self, memory: Tensor) -> None:
        pass

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def copying(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def copy_(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self.queues["copy"].append(("run", functools.partial(target.copy_, source)))

    def clear_(self, target: Tensor) -> None:
        self.queues["copy"].append(("run", target.zero_))

    def stage(self, values: Tensor) -> Tensor:
        return values.clone()

    def mark(self, *, is_timed: bool = False) -> int:
        mark = self._mark_on("copy")
        if is_timed:
            self.timed.add(mark)
        return mark

    def caller(self) -> str:
        return "compute"

    def mark_use(self) -> tuple[str, int]:
        return "compute", self._mark_on("compute")

    def follow(self, mark: int) -> None:
        self.queues["copy"].append(("wait", mark))

    def gate(self, mark: int) -> None:
        self.queues["compute"].append(("wait", mark))

    def is_reached(self, mark: int) -> bool:
        return mark in self.reached

    def synchronize(self, mark: int) -> None:
        assert self.may_synchronize, "the host must not wait here"
        while mark not in self.reached:
            assert self.step("copy") or self.step("compute"), "the mark is never reached"

    def seconds(self, first: int, last: int) -> float:
        assert self.timed >= {first, last}, "CUDA refuses other events"
        return (last - first) * 1e-4


@dataclass
class Kit:
    """What a test of the pool needs."""

    device: torch.device
    pools: list[AdapterPool] = field(default_factory=list)

    def pool(self, max_adapters: int = 2, **options: Any) -> AdapterPool:
        """A pool for the small model whose free memory is NaN."""
        settings: dict[str, Any] = {"dtype": torch.float32, "device": self.device, **options}
        pool = AdapterPool(
            settings.pop("layers", None) or make_layers(), max_adapters=max_adapters, **settings
        )
        pool.table(next(iter(pool.layers))).storages[0].fill_(255)
        if pool.device.type == "cuda":
            torch.cuda.synchronize()
        self.pools.append(pool)
        return pool

    def synchronize(self) -> None:
        """Wait until all copies are done; on a GPU that others use, that may be a while."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def streams(self, **options: Any) -> Streams:
        """A simulated device with two streams."""
        return Streams(**options)

    def adapter(self, seed: int = 0, rank: int = 8, **options: Any) -> Adapter:
        """An adapter for the small model; see :func:`make_adapter`."""
        return make_adapter(seed, rank, **options)

    def layers(self, count: int = 3) -> dict[str, LayerShape]:
        """Layers of the small model."""
        return make_layers(count)

    def read(self, pool: AdapterPool, slot: int) -> dict[tuple[str, int], SliceView]:
        """Follow the pointers of one slot."""
        return read_slot(pool, slot)

    def mismatch(self, pool: AdapterPool, slot: int, adapter: Adapter) -> str:
        """Where a slot differs from an adapter, "" if nowhere."""
        return mismatch(pool, slot, adapter)

    def assert_slot(self, pool: AdapterPool, slot: int, adapter: Adapter) -> None:
        assert mismatch(pool, slot, adapter) == ""

    def assert_serves(self, pool: AdapterPool, name: str, adapter: Adapter) -> None:
        """Acquiring the name gives the adapter's weights."""
        with pool.acquire([name]) as lease:
            self.assert_slot(pool, lease.indices[0], adapter)


@pytest.fixture
def kit(device: torch.device) -> Iterator[Kit]:
    kit = Kit(device)
    yield kit
    for pool in kit.pools:
        pool.close()
