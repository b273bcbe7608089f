"""A model's layers at decode and at prefill, every provider side by side in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from loraplex.bench.ceilings import Ceilings
from loraplex.bench.layers import ModelLayers
from loraplex.bench.layers_batch import PREFILL_TOKENS, Batch, answers, make_sets, time_checked
from loraplex.bench.suite_providers import Provider, merged_answer
from loraplex.bench.timing import Timing
from loraplex.bench.tune_workers import describe


@dataclass(frozen=True)
class Case:
    """A batch that goes through all layers of a model."""

    m: int
    adapters: int
    rank: int
    is_mixed: bool = False
    slots: int = 0
    max_rank: int = 0

    @property
    def name(self) -> str:
        """For people."""
        ranks = f"rank {self.rank}" if not self.is_mixed else f"ranks 8 to {self.rank}"
        slots = f" of {self.slots} slots" if self.slots > self.adapters else ""
        pool = f" in a rank-{self.max_rank} pool" if self.max_rank > self.rank else ""
        tokens = "1 token" if self.m == 1 else f"{self.m} tokens"
        adapters = "1 adapter" if self.adapters == 1 else f"{self.adapters} adapters"
        return f"{tokens}, {adapters}{slots}, {ranks}{pool}"

    @property
    def phase(self) -> str:
        """``decode`` or ``prefill``."""
        return "prefill" if self.m >= PREFILL_TOKENS else "decode"


CASES = (
    Case(1, 1, 16),
    Case(16, 4, 16),
    Case(16, 16, 64),
    Case(64, 1, 16),
    Case(64, 8, 16),
    Case(64, 8, 64, is_mixed=True),
    Case(64, 64, 16),
    Case(256, 32, 16),
    Case(1024, 4, 16),
    Case(4096, 8, 16),
    Case(4096, 8, 64, is_mixed=True),
)
TINY_CASES = (Case(1, 1, 8), Case(8, 2, 8))

# What a curve varies, along its x axis, at batch 64 with 8 adapters of rank 16 if not said.
CURVES: Mapping[str, tuple[str, tuple[tuple[int, Case], ...]]] = {
    "rank": ("rank of 8 adapters, 64 tokens", tuple(
        (rank, Case(64, 8, rank)) for rank in (8, 16, 32, 64, 128, 256)
    )),
    "adapters": ("distinct adapters of rank 16, 64 tokens", tuple(
        (count, Case(64, count, 16)) for count in (1, 2, 4, 8, 16, 32, 64)
    )),
    "tokens": ("tokens, at most 8 adapters of rank 16", tuple(
        (m, Case(m, min(m, 8), 16)) for m in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    )),
    "slots": ("slots of the pool, 8 adapters of rank 16 occur, 64 tokens", tuple(
        (slots, Case(64, 8, 16, slots=slots)) for slots in (8, 16, 32, 64, 128, 256)
    )),
    "capacity": ("rank capacity of the pool, 8 adapters of rank 8, 64 tokens", tuple(
        (rank, Case(64, 8, 8, max_rank=rank)) for rank in (8, 16, 32, 64, 128, 256)
    )),
}  # fmt: skip
TINY_CURVES: Mapping[str, tuple[str, tuple[tuple[int, Case], ...]]] = {
    "rank": ("rank of 2 adapters, 4 tokens", ((8, Case(4, 2, 8)), (16, Case(4, 2, 16)))),
}
CURVE_PROVIDERS = ("base", "lora_linear", "gemm_add")


@dataclass(frozen=True)
class Row:
    """One provider on one layer, or on a whole block (layer ``block``).

    Attributes:
        ms: median with its spread; None where the result is wrong or it failed.
        tax: time over that of ``base``; floor_ms: the byte floor of this work.
        multiple, share: time over the floor, and the floor over the time.
        why: why there is no time.
    """

    case: str
    layer: str
    provider: str
    ms: Timing | None
    tax: float | None = None
    floor_ms: float | None = None
    multiple: float | None = None
    share: float | None = None
    why: str = ""


BLOCK = "block"


def run_case(
    case: Case,
    model: ModelLayers,
    dtype: torch.dtype,
    device: torch.device,
    ways: Sequence[Provider],
    ceilings: Ceilings | None,
    rounds: tuple[int, int],
    *,
    on_start: Callable[[str], None] = lambda label: None,
    on_done: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Rows of every layer, and of the block that they make.

    Args:
        ways: providers, ``base`` among them.
        rounds: warm-up and timed replays.
        on_start, on_done: told before and after each provider on each layer.
    """
    rows: list[Row] = []
    for layer in model.layers:
        batch = Batch(
            layer, case.m, case.adapters, case.rank, dtype, case.is_mixed, case.slots, case.max_rank
        )  # fmt: skip
        sets = make_sets(batch, device)
        right = answers(batch, sets[0])
        if any(way.work == "merged" for way in ways):
            right["merged"] = merged_answer(batch, sets[0])
        own = []
        for way in ways:
            on_start(f"{layer.name}, {case.name}: {way.name}")
            timing, why = None, ""
            try:
                calls = [way.prepare(batch, tensors) for tensors in sets]
                timing, verdict = time_checked(
                    calls, right[way.work], warmup=rounds[0], repeat=rounds[1]
                )
                why = "" if timing else f"wrong: {verdict}"
                del calls
            except Exception as error:  # who cannot run a case is reported, not hidden
                why = f"failed: {describe(error)}"
            floor = ceilings.floor_ms(*batch.work()[way.floor_work]) if ceilings else None
            own.append(Row(case.name, layer.name, way.name, timing, floor_ms=floor, why=why))
            on_done()
        rows += with_ratios(own)
        del sets, right
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return [*rows, *block_rows(rows)]


def block_rows(rows: Sequence[Row]) -> list[Row]:
    """Each provider's sum over the layers of one case; no sum where a layer has no time."""
    sums = []
    for name in dict.fromkeys(row.provider for row in rows):
        own = [row for row in rows if row.provider == name]
        missing = [row.layer for row in own if row.ms is None]
        total: Timing | None = None
        for row in own:
            if row.ms is not None:
                total = row.ms if total is None else total + row.ms
        floors = [row.floor_ms for row in own if row.floor_ms is not None]
        sums.append(
            Row(
                own[0].case, BLOCK, name, None if missing else total,
                floor_ms=sum(floors) if floors else None,
                why=f"no time for {', '.join(missing)}" if missing else "",
            )
        )  # fmt: skip
    return with_ratios(sums)


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Rows of one layer with their ratios to ``base`` and to the floor."""
    base = next((row.ms for row in rows if row.provider == "base"), None)
    found = []
    for row in rows:
        ms = row.ms.median if row.ms else None
        floor = row.floor_ms
        has_floor = ms is not None and floor is not None
        found.append(
            Row(
                row.case, row.layer, row.provider, row.ms,
                tax=ms / base.median if ms is not None and base is not None else None,
                floor_ms=floor,
                multiple=ms / floor if has_floor and ms and floor else None,
                share=floor / ms if has_floor and ms and floor else None,
                why=row.why,
            )
        )  # fmt: skip
    return found
