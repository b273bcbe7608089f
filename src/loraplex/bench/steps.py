"""The ladder of one LoRA layer: serial torch, Triton matmul, fused expand, ``lora_linear``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import loraplex as lp
from loraplex.bench.ceilings import Ceilings, measure_ceilings
from loraplex.bench.layer import Shape, Tensors, make_sets, make_truths
from loraplex.bench.timing import Timing, time_events, time_graph, time_host
from loraplex.bench.verdict import Verdict, judge

Truths = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rung:
    """One line of the ladder.

    Attributes:
        key, label: for JSON and for people; group: ``serial``, ``matmul`` or ``fused``.
        call: does the work on one set of buffers.
        flops: of the work; elements: read or written once, in units of the dtype.
        against: key of the serial line that does the same work; "" for a part of the whole.
        computes: ``base`` (X C), ``whole`` (X C + X A B) or "" for parts, which are not judged.
        is_interpreted: Triton's interpreter does the work, so that only the result means something.
    """

    key: str
    label: str
    group: str
    call: Callable[[Tensors], Tensor] | None
    flops: float
    elements: float
    against: str = "serial"
    computes: str = ""
    is_interpreted: bool = False


@dataclass(frozen=True)
class Row:
    """What was measured for one rung; there are no times where the result is wrong.

    Attributes:
        eager, graph: one call at a time, and in a replayed CUDA graph (None without a GPU).
        against, ratio: the serial line that does the same work, and our time over its time.
        floor_ms, floor_share: the byte floor, and which part of the time it is (on a GPU).
    """

    key: str
    label: str
    group: str
    eager: Timing | None
    graph: Timing | None
    against: str
    verdict: Verdict | None
    is_interpreted: bool = False
    floor_ms: float | None = None
    tflops: float | None = None
    gb_per_s: float | None = None
    floor_share: float | None = None
    ratio: float | None = None

    @property
    def best(self) -> Timing | None:
        """The timing that ratios and rates come from: graph replay where there is one."""
        return self.graph or self.eager


@dataclass(frozen=True)
class Ladder:
    """All rows, with what they were measured on."""

    shape: Shape
    device: str
    is_gpu: bool
    sets: int
    ceilings: Ceilings | None
    rows: Sequence[Row]

    @property
    def is_correct(self) -> bool:
        """Whether every judged rung is right."""
        return all(row.verdict is None or row.verdict.is_correct for row in self.rows)


def rungs(shape: Shape, impl: str, *, is_gpu: bool) -> list[Rung]:
    """The ladder for one shape; ``impl`` is the Triton way that ``lora_linear`` runs."""
    m, k, n, r = shape.m, shape.k, shape.n, shape.r
    base, shrink, expand = 2.0 * m * k * n, 2.0 * m * k * r, 2.0 * m * r * n
    whole, io = base + shrink + expand + m * n, m * k + k * n + k * r + r * n + m * n
    serial = [
        Rung("shrink", "Y = X @ A", "serial", lambda t: t.x @ t.a, shrink, m * k + k * r + m * r),
        Rung("expand", "Z = Y @ B", "serial", lambda t: t.y @ t.b, expand, m * r + r * n + m * n),
        Rung("base", "W = X @ C", "serial", lambda t: t.x @ t.c, base, m * k + k * n + m * n,
             computes="base"),
        Rung("add", "O = W + Z", "serial", lambda t: t.w + t.z, m * n, 3 * m * n),
        Rung("sum", "the four, summed", "serial", None, whole, io),
        Rung("serial", "X @ C + (X @ A) @ B", "serial",
             lambda t: t.x @ t.c + (t.x @ t.a) @ t.b, whole, io, computes="whole"),
    ]  # fmt: skip
    ours = [
        Rung("matmul", "matmul(X, C)", "matmul", lambda t: lp.matmul(t.x, t.c, impl="triton"),
             base, m * k + k * n + m * n, against="base", computes="base"),
        Rung("fused", "Y = X @ A; fused_matmul_expand(X, C, Y, B)", "fused",
             lambda t: lp.fused_matmul_expand(t.x, t.c, t.x @ t.a, t.b, impl="triton"),
             whole, io, computes="whole"),
        Rung("lora_linear", f"lora_linear, {impl}", "fused", partial(_lora_linear, impl=impl),
             whole, io, computes="whole"),
    ]  # fmt: skip
    if is_gpu:
        return serial + ours
    # What a machine without a GPU really runs; the kernels follow in the interpreter.
    host = Rung(
        "lora_linear_torch", "lora_linear, torch", "fused", partial(_lora_linear, impl="torch"),
        whole, io, computes="whole",
    )  # fmt: skip
    return [*serial, host, *(replace(rung, is_interpreted=True) for rung in ours)]


def _lora_linear(t: Tensors, *, impl: str) -> Tensor:
    return lp.lora_linear(t.x, t.weight, t.table, t.routing, impl=impl)


def run_ladder(
    shape: Shape,
    device: torch.device,
    *,
    warmup: int,
    repeat: int,
    on_start: Callable[[str], None] = lambda label: None,
    on_done: Callable[[], None] = lambda: None,
) -> Ladder:
    """Measure every rung; a rung with a wrong result gets a verdict and no times.

    Args:
        on_start, on_done: told before and after each of the :func:`num_pieces` pieces of work.

    Raises:
        ValueError: a size below 1, or fewer than one repeat.
        UnsupportedImplError: the Triton path cannot run here with this dtype.
    """
    if repeat < 1 or warmup < 0:
        raise ValueError(f"repeat must be >= 1 and warmup >= 0, got {repeat} and {warmup}")
    # On host tensors "auto" is the torch reference; the ladder is about the kernels.
    is_gpu = device.type == "cuda"
    impl = "auto" if is_gpu else "triton"
    choice = lp.explain(
        "lora_linear", m=shape.m, k=shape.k, slices=[shape.n], num_adapters=1,
        max_rank=shape.r, dtype=shape.dtype, device=device, impl=impl,
    ).choice  # fmt: skip
    on_start("copy bandwidth and matrix rate")
    ceilings = measure_ceilings(device, shape.dtype) if is_gpu else None
    on_done()

    sets = make_sets(shape, device)
    truths = make_truths(sets[0])
    measured: dict[str, Row] = {}
    rounds = (warmup, repeat)
    for rung in rungs(shape, choice.impl, is_gpu=is_gpu):
        on_start(rung.label)
        measured[rung.key] = _measure(rung, sets, truths, measured, ceilings, rounds)
        on_done()
    rows = _with_ratios(list(measured.values()))
    return Ladder(shape, _name_of(device), is_gpu, len(sets), ceilings, rows)


def num_pieces(*, is_gpu: bool) -> int:
    """How many pieces of work :func:`run_ladder` tells of."""
    shape = Shape(1, 1, 1, 1, torch.float32)
    return len(rungs(shape, "", is_gpu=is_gpu)) + 1


def _measure(
    rung: Rung,
    sets: Sequence[Tensors],
    truths: Truths,
    measured: Mapping[str, Row],
    ceilings: Ceilings | None,
    rounds: tuple[int, int],
) -> Row:
    verdict: Verdict | None = None
    if rung.call is None:
        parts = [measured[key] for key in ("shrink", "expand", "base", "add")]
        times = (_sum([part.eager for part in parts]), _sum([part.graph for part in parts]))
    else:
        times, verdict = _time(rung, rung.call, sets, truths, rounds)
    row = Row(
        rung.key, rung.label, rung.group, *times, rung.against, verdict, rung.is_interpreted
    )  # fmt: skip
    num_bytes = rung.elements * sets[0].x.element_size()
    floor_ms = ceilings.floor_ms(num_bytes, rung.flops) if ceilings else None
    if row.best is None:
        return replace(row, floor_ms=floor_ms)
    ms = row.best.median
    return replace(
        row,
        floor_ms=floor_ms,
        floor_share=floor_ms / ms if floor_ms is not None else None,
        tflops=rung.flops / ms / 1e9,
        gb_per_s=num_bytes / ms / 1e6,
    )


def _time(
    rung: Rung,
    call: Callable[[Tensors], Tensor],
    sets: Sequence[Tensors],
    truths: Truths,
    rounds: tuple[int, int],
) -> tuple[tuple[Timing | None, Timing | None], Verdict | None]:
    """Judge, time, judge again: replays must leave nothing behind that makes a call wrong."""
    calls = [lambda tensors=tensors: call(tensors) for tensors in sets]
    warmup, repeat = rounds

    def check() -> Verdict | None:
        return judge(calls[0](), *truths[rung.computes]) if rung.computes else None

    verdict = check()
    if verdict is not None and not verdict.is_correct:
        return (None, None), verdict
    if sets[0].x.is_cuda:
        eager = time_events(calls, warmup=warmup, repeat=repeat)
        graph = time_graph(calls, warmup=warmup, repeat=repeat)
    else:
        eager, graph = time_host(calls, warmup=warmup, repeat=repeat), None
    verdict = check()
    if verdict is not None and not verdict.is_correct:
        return (None, None), verdict
    return (eager, graph), verdict


def _sum(timings: Sequence[Timing | None]) -> Timing | None:
    total: Timing | None = None
    for timing in timings:
        if timing is None:
            return None
        total = timing if total is None else total + timing
    return total


def _with_ratios(rows: list[Row]) -> list[Row]:
    """Ratios need the serial lines, which are measured before or after the line itself."""
    best = {row.key: row.best for row in rows}

    def ratio(row: Row) -> float | None:
        own, other = best[row.key], best[row.against]
        return own.median / other.median if own and other else None

    return [replace(row, ratio=ratio(row)) for row in rows]


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
