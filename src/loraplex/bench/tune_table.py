"""From the fastest candidates to rules of a tuning table."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.bench.layers_batch import Batch
from loraplex.bench.tune_candidates import Candidate
from loraplex.errors import LoraplexError
from loraplex.tuning.choose import check_table

# Rules that carry this note are ours to replace; others are somebody's own and stay in front.
NOTE = "measured by loraplex tune"
Rule = Mapping[str, Any]


@dataclass(frozen=True)
class Winner:
    """The fastest candidates of one batch, in milliseconds with the base GEMM.

    Attributes:
        best: of all; add: of ``gemm_add``, whose LoRA part is ``add_lora_``; None if none ran.
        base_ms: cuBLAS on the base GEMM alone.
        failed, wrong: how many candidates have no time.
    """

    batch: Batch
    best: Candidate | None
    ms: float | None
    add: Candidate | None
    add_ms: float | None
    base_ms: float
    failed: int
    wrong: int


def make_rules(winners: Sequence[Winner], remark: str = "") -> dict[str, list[Rule]]:
    """Rules by op; a batch size holds from just above the next smaller one measured.

    Each rule's note has its times, or the remark in their place.
    The largest batch size has no upper bound: what was measured at 4096 tokens is the best guess
    for more.
    """
    rules: dict[str, list[Rule]] = {"lora_linear": [], "add_lora": []}
    layers = {(w.batch.layer.k, w.batch.layer.slices) for w in winners}
    for k, slices in sorted(layers):
        own = [w for w in winners if (w.batch.layer.k, w.batch.layer.slices) == (k, slices)]
        own.sort(key=lambda winner: winner.batch.m)
        for number, winner in enumerate(own):
            when = _when(winner.batch)
            if number > 0:
                when["min_m"] = own[number - 1].batch.m + 1
            if number < len(own) - 1:
                when["max_m"] = winner.batch.m
            if winner.best is not None:
                rules["lora_linear"].append(_rule(winner, winner.best, winner.ms, when, remark))
            if winner.add is not None:
                add = Candidate("shrink_expand", winner.add.configs)
                rules["add_lora"].append(_rule(winner, add, winner.add_ms, when, remark))
    return rules


def _when(batch: Batch) -> dict[str, Any]:
    return {
        "dtype": [str(batch.dtype).removeprefix("torch.")],
        "k": batch.layer.k,
        "slices": list(batch.layer.slices),
        "is_vectorizable": True,
        "max_rank": batch.capacity,
        "max_adapters": batch.num_slots,
    }


def _rule(winner: Winner, candidate: Candidate, ms: float | None, when: Rule, remark: str) -> Rule:
    time = (
        remark
        or f"{1e3 * (ms or 0):.1f} us at M={winner.batch.m}, base {1e3 * winner.base_ms:.1f} us"
    )
    configs = {kernel: dict(config) for kernel, config in candidate.configs.items()}
    return {"impl": candidate.impl, "when": dict(when), "note": f"{NOTE}: {time}", **configs}


def merge(old: Mapping[str, Any], new: Mapping[str, Sequence[Rule]], about: str) -> dict[str, Any]:
    """A table with the new rules in it.

    Somebody's own rules come first, then measured ones, those for the smallest pools before those
    that would match too. Measured rules for the same layer, dtype and pool are replaced as a whole.
    """
    table: dict[str, Any] = {**old, "about": about}
    for op, rules in new.items():
        before = old.get(op, [])
        own = [rule for rule in before if not str(rule.get("note", "")).startswith(NOTE)]
        replaced = {_scope(rule) for rule in rules}
        kept = [rule for rule in before if rule not in own and _scope(rule) not in replaced]
        measured = sorted([*kept, *rules], key=_pool_size)
        table[op] = [*own, *measured]
    return table


def _scope(rule: Rule) -> str:
    when = {k: v for k, v in rule.get("when", {}).items() if k not in ("min_m", "max_m")}
    return json.dumps(when, sort_keys=True)


def _pool_size(rule: Rule) -> tuple[int, int]:
    when = rule.get("when", {})
    return when.get("max_rank", 1 << 30), when.get("max_adapters", 1 << 30)


def write_table(path: Path, new: Mapping[str, Sequence[Rule]], about: str) -> None:
    """Merge rules into the table in ``path``, whole or not at all.

    Raises:
        LoraplexError: the file that is there is no tuning table.
    """
    old: Mapping[str, Any] = {}
    if path.exists():
        try:
            old = check_table(str(path), json.loads(path.read_text()))
        except ValueError as error:
            raise LoraplexError(f"{path} is no tuning table: {error}") from error
    table = merge(old, new, about)
    check_table(str(path), table)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(_format(table))
    os.replace(part, path)


def _format(table: Mapping[str, Any]) -> str:
    """One line per rule, as the shipped tables have it."""
    ops = []
    for op, rules in table.items():
        if isinstance(rules, str):
            ops.append(f" {json.dumps(op)}: {json.dumps(rules)}")
            continue
        lines = ",\n".join(f"  {json.dumps(rule)}" for rule in rules)
        ops.append(f" {json.dumps(op)}: [\n{lines}\n ]" if rules else f" {json.dumps(op)}: []")
    return "{\n" + ",\n".join(ops) + "\n}\n"
