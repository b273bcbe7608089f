"""A batch on one layer of a model: its tensors, the right answer, and a time for whoever has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

import loraplex as lp
from loraplex.bench.cases import draw_indices
from loraplex.bench.layers import Layer
from loraplex.bench.timing import Timing, time_graph, time_host
from loraplex.bench.verdict import Verdict, judge

MAX_SETS = 8
MIXED_RANKS = (8, 16, 32, 64, 128)
SCALING = 0.5
# From here on a batch is taken for a prefill, where the tokens of a request lie side by side.
PREFILL_TOKENS = 512


@dataclass(frozen=True)
class Batch:
    """M tokens on one layer.

    Attributes:
        adapters: how many different ones occur; rank: of each, or the largest if ``is_mixed``.
        slots, max_rank: capacity of the pool; 0: what occurs.
    """

    layer: Layer
    m: int
    adapters: int
    rank: int
    dtype: torch.dtype
    is_mixed: bool = False
    slots: int = 0
    max_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("m", "adapters", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""
        return max(self.slots, self.adapters)

    @property
    def capacity(self) -> int:
        """Rank capacity of the pool."""
        return max(self.max_rank, self.rank)

    @property
    def ranks(self) -> list[int]:
        """Rank of each slot."""
        choices = [rank for rank in MIXED_RANKS if rank <= self.rank] or [self.rank]
        if not self.is_mixed:
            choices = [self.rank]
        return [choices[slot % len(choices)] for slot in range(self.num_slots)]

    def indices(self) -> Tensor:
        """Slot of each token: in turn and shuffled at decode, in runs at prefill."""
        if self.m >= PREFILL_TOKENS:
            own = torch.arange(self.m) * self.adapters // self.m
        else:
            own = draw_indices("distinct", self.m, self.adapters, torch.Generator().manual_seed(0))
        return own * (self.num_slots // self.adapters)

    @property
    def key(self) -> str:
        """A name that tells batches apart in files."""
        dtype = str(self.dtype).removeprefix("torch.")
        widths = "+".join(map(str, self.layer.slices))
        mixed = "mixed" if self.is_mixed else ""
        return (
            f"{self.layer.name} {self.layer.k}>{widths} M={self.m} L={self.adapters}/"
            f"{self.num_slots} r={self.rank}{mixed}/{self.capacity} {dtype}"
        )

    def work(self) -> dict[str, tuple[float, float]]:
        """(bytes that must move once, FLOPs) of the base GEMM and of the whole layer."""
        k, n, parts = self.layer.k, self.layer.n, len(self.layer.slices)
        indices, ranks, width = self.indices().tolist(), self.ranks, parts * k + n
        moved = n * k + self.m * (k + n)
        flops = 2.0 * self.m * n * k
        used = sum(ranks[slot] for slot in set(indices))
        added = 2.0 * width * sum(ranks[slot] for slot in indices)
        size = self.dtype.itemsize
        return {
            "base": (size * moved, flops),
            "whole": (size * (moved + used * width), flops + added),
        }


@dataclass(frozen=True)
class Tensors:
    """One set of buffers; ``rows`` are the tokens of each slot that occurs."""

    x: Tensor
    weight: Tensor
    a_pool: Tensor
    b_pool: Tensor
    table: lp.AdapterTable
    routing: lp.Routing
    rows: Mapping[int, Tensor]


def make_sets(batch: Batch, device: torch.device, count: int = 0) -> list[Tensors]:
    """Sets of tensors to rotate past the L2 cache; one on the CPU, ``count`` if given."""
    if not count and device.type == "cuda":
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 * 2**20)
        size = batch.layer.n * batch.layer.k * batch.dtype.itemsize
        count = max(2, min(MAX_SETS, math.ceil(4 * cache / size)))
    return [_make_tensors(batch, device, seed) for seed in range(max(1, count))]


def _make_tensors(batch: Batch, device: torch.device, seed: int) -> Tensors:
    generator = torch.Generator(device).manual_seed(seed)
    layer, slots, capacity = batch.layer, batch.num_slots, batch.capacity

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(*size, generator=generator, device=device, dtype=batch.dtype)
        return values.mul_(scale)

    indices = batch.indices().to(device)
    a_pool = draw(slots, len(layer.slices) * capacity, layer.k, scale=layer.k**-0.5)
    b_pool = draw(slots, layer.n, capacity, scale=batch.rank**-0.5)
    table = lp.AdapterTable.from_pools(
        a_pool, b_pool, layer.slices, [SCALING] * slots, batch.ranks
    )  # fmt: skip
    return Tensors(
        x=draw(batch.m, layer.k),
        weight=draw(layer.n, layer.k, scale=layer.k**-0.5),
        a_pool=a_pool,
        b_pool=b_pool,
        table=table,
        routing=lp.Routing.from_indices(indices, num_adapters=slots),
        rows={slot: (indices == slot).nonzero()[:, 0] for slot in sorted(set(indices.tolist()))},
    )


def parts_of(batch: Batch, tensors: Tensors, slot: int) -> list[tuple[slice, Tensor, Tensor]]:
    """(columns, A, B) of every slice of one slot."""
    rank, capacity, slices = batch.ranks[slot], batch.capacity, batch.layer.slices
    a, b = tensors.a_pool[slot], tensors.b_pool[slot]
    return [
        (
            slice(start, start + width),
            a[part * capacity : part * capacity + rank],
            b[start : start + width, :rank],
        )
        for part, (start, width) in enumerate(
            zip(accumulate(slices, initial=0), slices, strict=False)
        )
    ]


def serial(batch: Batch, tensors: Tensors, dtype: torch.dtype | None = None) -> Tensor:
    """The layer in plain torch, adapter by adapter; in float64 this is the right answer."""
    dtype = dtype or batch.dtype
    x = tensors.x.to(dtype)
    y = F.linear(x, tensors.weight.to(dtype))
    for slot, rows in tensors.rows.items():
        own = x[rows]
        for columns, a, b in parts_of(batch, tensors, slot):
            y[rows, columns] += SCALING * ((own @ a.to(dtype).T) @ b.to(dtype).T)
    return y


@dataclass(frozen=True)
class Answer:
    """What a call must give on the first set: eager torch in the same dtype, and float64."""

    eager: Tensor
    truth: Tensor
    slack: float

    def judge(self, result: Tensor) -> Verdict:
        """The rule of :func:`loraplex.bench.verdict.judge`."""
        return judge(result, self.eager, self.truth, slack=self.slack)


def answers(batch: Batch, tensors: Tensors) -> dict[str, Answer]:
    """Right answers of the base GEMM (``base``) and of the layer with its adapters (``whole``)."""
    x, weight = tensors.x, tensors.weight
    found = {
        "base": (F.linear(x, weight), F.linear(x.double(), weight.double())),
        "whole": (serial(batch, tensors), serial(batch, tensors, torch.float64)),
    }
    return {name: make_answer(batch, *pair) for name, pair in found.items()}


def make_answer(batch: Batch, eager: Tensor, truth: Tensor) -> Answer:
    """An answer that allows one rounding more, since eager is exact by luck where it is short."""
    size = max(float(truth.abs().max()), 1.0)
    inner = torch.finfo(torch.float32).eps * math.sqrt(batch.layer.k + batch.rank)
    return Answer(eager, truth, size * (inner + torch.finfo(batch.dtype).eps))


def time_checked(
    calls: Sequence[Callable[[], Tensor]], answer: Answer, *, warmup: int, repeat: int
) -> tuple[Timing | None, Verdict]:
    """Judge, time, judge again; no time if either is wrong.

    Args:
        calls: the same work on every set of tensors; the answer is that of the first.
    """
    result = calls[0]()
    verdict = answer.judge(result)
    if not verdict.is_correct:
        return None, verdict
    timer = time_graph if result.is_cuda else time_host
    timing = timer(calls, warmup=warmup, repeat=repeat)
    # replays must leave nothing behind that makes a call wrong
    verdict = answer.judge(calls[0]())
    return (timing if verdict.is_correct else None), verdict
