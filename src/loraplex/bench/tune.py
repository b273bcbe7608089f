"""Measure candidates on every layer and batch size of a model, and keep the fastest right one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from loraplex.bench.layers_batch import (
    Answer,
    Batch,
    Tensors,
    answers,
    make_sets,
    time_checked,
)
from loraplex.bench.tune_candidates import (
    Candidate,
    first_round,
    second_round,
    third_round,
)
from loraplex.bench.tune_journal import Journal, Result
from loraplex.bench.tune_table import Winner
from loraplex.bench.tune_workers import describe, run_all
from loraplex.ops.lora_linear import run_choice
from loraplex.ops.routed import Layout, Routed, layout_of

MOST_WORKERS = 16
# A worker holds a context and one layer's tensors; the GPU must have room for all of them.
WORKER_BYTES = 2 * 2**30
# Seconds for one candidate to compile; one that takes longer is not worth shipping.
COMPILE_SECONDS = 120.0
# Timed graph replays: enough to sort candidates, and enough to tell the last ones apart.
FIRST_REPEAT, FINAL_REPEAT = 9, 31
FINALISTS = 3
BASE = "base"
FINAL = "final "

Task = tuple[Batch, Candidate]


class Progress(Protocol):
    """What a progress bar is told."""

    def start(self, label: str) -> None:
        """Name what runs now."""

    def advance(self) -> None:
        """One unit is done."""


@dataclass(frozen=True)
class Search:
    """How wide to look.

    Attributes:
        multiprocessors, arch: of the GPU; see :func:`first_round`.
        workers: processes that compile; 0: none, candidates compile as they are measured.
        is_rehearsal: one candidate of each way only, for a machine whose times mean nothing.
    """

    multiprocessors: int
    arch: str
    workers: int
    is_rehearsal: bool = False

    def proposals(self, number: int, batch: Batch, journal: Journal) -> list[Candidate]:
        """Candidates of round 1, 2 or 3, given the results of the rounds before."""
        opening = first_round(batch, self.multiprocessors, self.arch)
        if self.is_rehearsal:
            ways = {candidate.impl: candidate for candidate in reversed(opening)}
            return list(ways.values()) if number == 1 else []
        if number == 1:
            return opening
        found = []
        for impl in ("fused", "gemm_add"):
            best = fastest(batch, [c for c in opening if c.impl == impl], journal)[:1]
            for candidate in best:
                variants = second_round(batch, candidate)
                if number == 2:
                    found += variants
                else:
                    ahead = fastest(batch, [candidate, *variants], journal)
                    faster = ahead[: ahead.index(candidate)]
                    found += third_round(candidate, faster)
        return found


def default_workers(device: torch.device) -> int:
    """As many compiling processes as there are cores, and room for on the GPU."""
    free = torch.cuda.mem_get_info(device)[0] // WORKER_BYTES
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)), free))


def tune(
    batches: Sequence[Batch],
    device: torch.device,
    journal: Journal,
    search: Search,
    *,
    progress: Callable[[int], AbstractContextManager[Progress]],
    say: Callable[[str], None] = lambda line: None,
) -> list[Winner]:
    """The fastest candidates of every batch; what the journal holds is not measured again.

    Nothing global changes: each candidate is handed to the op for its one call.
    """
    for number in (1, 2, 3):
        tasks = [(b, c) for b in batches for c in search.proposals(number, b, journal)]
        missing = [(b, c) for b, c in tasks if journal.get(b.key, c.key) is None]
        say(f"round {number} of 3: {len(tasks)} candidates, {len(missing)} to measure")
        if search.workers and missing:
            _compile(missing, journal, search.workers, progress)
            missing = [(b, c) for b, c in missing if journal.get(b.key, c.key) is None]
        repeat = 1 if search.is_rehearsal else FIRST_REPEAT
        _measure_all(missing, device, journal, progress, repeat, "")
    every = [(b, c) for b in batches for c in _all_candidates(search, b, journal)]
    finals = [
        (batch, candidate)
        for batch in batches
        for candidate in fastest(batch, (c for b, c in every if b is batch), journal)[:FINALISTS]
        if journal.get(batch.key, FINAL + candidate.key) is None
    ]
    say(f"the {FINALISTS} best of each once more, longer")
    repeat = 1 if search.is_rehearsal else FINAL_REPEAT
    _measure_all(finals, device, journal, progress, repeat, FINAL)
    return [_winner(b, [c for other, c in every if other is b], journal) for b in batches]


def fastest(batch: Batch, candidates: Iterable[Candidate], journal: Journal) -> list[Candidate]:
    """Candidates that have a time, the fastest first."""
    timed = []
    for candidate in candidates:
        result = journal.get(batch.key, candidate.key)
        if result is not None and result.ms is not None:
            timed.append((result.ms, candidate))
    return [candidate for _, candidate in sorted(timed, key=lambda pair: pair[0])]


def _all_candidates(search: Search, batch: Batch, journal: Journal) -> list[Candidate]:
    found = [c for number in (1, 2, 3) for c in search.proposals(number, batch, journal)]
    return list({candidate.key: candidate for candidate in found}.values())


def _winner(batch: Batch, candidates: Sequence[Candidate], journal: Journal) -> Winner:
    def ms_of(candidate: Candidate) -> float:
        final = journal.get(batch.key, FINAL + candidate.key)
        first = journal.get(batch.key, candidate.key)
        ms = final.ms if final is not None else first.ms if first is not None else None
        return float("inf") if ms is None else ms

    # only those timed again compete: a lucky short measurement must not win
    finalists = [c for c in candidates if journal.get(batch.key, FINAL + c.key) is not None]
    right = sorted((c for c in finalists if ms_of(c) < float("inf")), key=ms_of)
    add = [c for c in right if c.impl == "gemm_add"]
    add = add or [c for c in fastest(batch, candidates, journal) if c.impl == "gemm_add"]
    base = journal.get(batch.key, BASE)
    untimed = [r for r in journal.results(batch.key) if r.ms is None]
    return Winner(
        batch,
        right[0] if right else None,
        ms_of(right[0]) if right else None,
        add[0] if add else None,
        ms_of(add[0]) if add else None,
        base.ms if base is not None and base.ms is not None else float("nan"),
        failed=sum(result.why.startswith("failed") for result in untimed),
        wrong=sum(result.why.startswith("wrong") for result in untimed),
    )


def _compile(
    tasks: Sequence[Task],
    journal: Journal,
    workers: int,
    progress: Callable[[int], AbstractContextManager[Progress]],
) -> None:
    """Fill Triton's cache on disk; what fails there is never launched in this process."""
    with progress(len(tasks)) as bar:
        bar.start(f"compiling in {workers} processes")

        def done(number: int, why: str) -> None:
            batch, candidate = tasks[number]
            if why:
                journal.put(Result(batch.key, candidate.key, None, f"failed: {why}"))
            bar.advance()

        run_all(launch_once, tasks, workers=workers, timeout=COMPILE_SECONDS, on_done=done)


def launch_once(task: Task) -> None:
    """Compile one candidate by running it, in a worker process."""
    batch, candidate = task
    (call,) = _calls(candidate, _latest_set(batch))
    call()
    torch.cuda.synchronize()
    if candidate.is_specialized:
        # in a graph it is another kernel, one that reads early; it is the one that gets a time
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()


@functools.lru_cache(maxsize=1)
def _latest_set(batch: Batch) -> list[Tensors]:
    # tasks come layer by layer, so that a worker makes few sets and holds one
    return make_sets(batch, torch.device("cuda", torch.cuda.current_device()), count=1)


def _measure_all(
    tasks: Sequence[Task],
    device: torch.device,
    journal: Journal,
    progress: Callable[[int], AbstractContextManager[Progress]],
    repeat: int,
    prefix: str,
) -> None:
    by_batch: dict[Batch, list[Candidate]] = {}
    for batch, candidate in tasks:
        by_batch.setdefault(batch, []).append(candidate)
    with progress(len(tasks)) as bar:
        for batch, candidates in by_batch.items():
            bar.start(f"{batch.layer.name} M={batch.m}")
            sets = make_sets(batch, device)
            right = answers(batch, sets[0])
            if journal.get(batch.key, BASE) is None:
                base = [functools.partial(F.linear, t.x, t.weight) for t in sets]
                journal.put(_measure(batch, BASE, base, right["base"], repeat))
                del base
            for candidate in candidates:
                name = prefix + candidate.key
                calls = _calls(candidate, sets)
                journal.put(_measure(batch, name, calls, right["whole"], repeat))
                bar.advance()
            del sets, right, calls
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _measure(
    batch: Batch, name: str, calls: Sequence[Callable[[], Tensor]], answer: Answer, repeat: int
) -> Result:
    try:
        timing, verdict = time_checked(calls, answer, warmup=min(5, repeat - 1), repeat=repeat)
    except Exception as error:  # whatever a candidate may do wrong is its own loss
        return Result(batch.key, name, None, f"failed: {describe(error)}")
    if timing is None:
        return Result(batch.key, name, None, f"wrong: {verdict}")
    return Result(batch.key, name, timing.median)


def _calls(candidate: Candidate, sets: Sequence[Tensors]) -> list[Callable[[], Tensor]]:
    choice = candidate.choice()
    return [functools.partial(run_choice, choice, t.x, t.weight, None, _routed(t)) for t in sets]


def _routed(tensors: Tensors) -> Routed:
    table, routing = tensors.table, tensors.routing
    return Routed(
        table.entries, table.storages, routing.indices, routing.places, routing.plan,
        tuple(table.slices), Layout(*layout_of(table)),
    )  # fmt: skip
