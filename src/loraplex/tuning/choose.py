"""The choice of implementation and block sizes for one problem; first matching rule wins."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from loraplex import env
from loraplex.errors import LoraplexError, UnsupportedImplError
from loraplex.tuning.problem import Problem

OPS = ("lora_linear", "add_lora", "multi_lora", "matmul")
CONDITIONS = (
    "dtype", "k", "n", "slices", "min_m", "max_m", "min_k", "max_k", "min_n", "max_n",
    "max_slices", "max_rank", "max_adapters", "is_vectorizable",
)  # fmt: skip
BLOCKS = ("block_m", "block_n", "block_k", "block_r")
WAYS = (
    "split_k",
    "lanes",
    "is_wide",
    "is_swapped",
    "has_descriptor",
    "is_single_launch",
    "is_specialized",
    "occupancy",
    "expand_at",
    "lora_steps",
    "has_lora_part",
    "has_early_b",
    "halves_tail",
    "prefetch",
    "is_early",
    "group_m",
    "lora_stages",
    "num_warps",
    "num_stages",
)
CONFIG_KEYS = frozenset((*BLOCKS, *WAYS))
# of the specialised launch: warps that multiply, and programs that share a multiprocessor
WARPS = ((4, 1), (8, 1), (4, 2))
MOST_COLUMNS = 256
KERNELS = ("shrink", "expand", "linear", "matmul", "one_launch")

Config = Mapping[str, int]


@dataclass(frozen=True)
class Choice:
    """What to run: ``impl``, the block sizes of each kernel it launches, and the reason."""

    impl: str
    configs: Mapping[str, Config]
    reason: str


@functools.lru_cache(maxsize=4096)
def choose(problem: Problem, impl: str = "") -> Choice:
    """First rule that matches, from the table of the architecture, then from the default table.

    Args:
        impl: only rules for this implementation, any if empty.

    Raises:
        UnsupportedImplError: if no rule for ``impl`` matches; says what its rules need.
        LoraplexError: if no rule matches, or a table file has an unknown key.
    """
    needs = []
    for name, rules in _tables(problem.arch):
        for number, rule in enumerate(rules.get(problem.op, ())):
            if impl and rule["impl"] != impl:
                continue
            when = rule.get("when", {})
            needs.append(" ".join(f"{key}={want}" for key, want in when.items()))
            if matches(when, problem):
                configs = {kernel: rule[kernel] for kernel in KERNELS if kernel in rule}
                return Choice(rule["impl"], configs, f"rule {number} of {problem.op} in {name}")
    if impl:
        needed = " or ".join(f"({need})" for need in dict.fromkeys(needs)) or "a rule"
        raise UnsupportedImplError(f"impl={impl!r} cannot run: it needs {needed}, got {problem}")
    raise LoraplexError(f"no tuning rule matches {problem}")


def matches(when: Mapping[str, Any], problem: Problem) -> bool:
    """Whether all conditions of a rule hold."""
    facts = {"m": problem.m, "k": problem.k, "n": problem.n}
    # no more can occur than there are tokens, however large the pool is
    most_adapters = min(problem.num_adapters, problem.m)
    for key, want in when.items():
        bound, _, name = key.partition("_")
        if key == "dtype":
            holds = problem.dtype in want
        elif key == "slices":
            holds = list(problem.slices) == want
        elif key in ("k", "n"):
            holds = facts[key] == want
        elif key == "max_slices":
            holds = len(problem.slices) <= want
        elif key == "max_rank":
            holds = problem.max_rank <= want
        elif key == "max_adapters":
            holds = most_adapters <= want
        elif key == "is_vectorizable":
            holds = problem.is_vectorizable == want
        else:
            holds = facts[name] >= want if bound == "min" else facts[name] <= want
        if not holds:
            return False
    return True


def check_table(name: str, table: object) -> Mapping[str, list[Mapping[str, Any]]]:
    """Require the form of a tuning table; unknown keys are errors, so a typo loses no rule.

    Raises:
        LoraplexError: names the table, the rule and the key.
    """
    if not isinstance(table, dict):
        raise LoraplexError(f"{name} must be an object of ops, got {type(table).__name__}")
    for op, rules in table.items():
        if op == "about":
            continue
        if op not in OPS:
            raise LoraplexError(f"{name} has unknown op {op!r}, known are {', '.join(OPS)}")
        for number, rule in enumerate(rules):
            where = f"rule {number} of {op} in {name}"
            if "impl" not in rule:
                raise LoraplexError(f"{where} has no impl")
            _check_keys(where, rule, ("impl", "when", "note", *KERNELS))
            _check_keys(f"{where}, when", rule.get("when", {}), CONDITIONS)
            for kernel in KERNELS:
                _check_keys(f"{where}, {kernel}", rule.get(kernel, {}), CONFIG_KEYS)
            _check_launch(where, rule.get("linear", {}), rule.get("shrink", {}))
    return table


def _check_launch(where: str, linear: Config, shrink: Config) -> None:
    is_single, is_specialized = linear.get("is_single_launch"), linear.get("is_specialized")
    if is_single and is_specialized:
        raise LoraplexError(f"{where}: a launch is is_single_launch or is_specialized, not both")
    if (is_single or is_specialized) and shrink.get("is_wide"):
        raise LoraplexError(f"{where}: the shrink of a single launch cannot be is_wide")
    # a stage is filled again while the next one is multiplied: with a single one it would never be
    if is_specialized and linear.get("num_stages", 0) < 2:
        raise LoraplexError(
            f"{where}: num_stages of is_specialized must be at least 2, got "
            f"{linear.get('num_stages')}"
        )
    columns = linear.get("block_r", 0)
    if is_specialized and not (16 <= columns <= MOST_COLUMNS and columns & (columns - 1) == 0):
        raise LoraplexError(
            f"{where}: block_r of is_specialized must be a power of two from 16 to {MOST_COLUMNS}, "
            f"got {columns}"
        )
    warps = (linear.get("num_warps"), linear.get("occupancy"))
    if is_specialized and warps not in WARPS:
        known = ", ".join(map(str, WARPS))
        raise LoraplexError(
            f"{where}: num_warps, occupancy of is_specialized must be one of {known}, got {warps}"
        )


def _check_keys(where: str, found: Mapping[str, Any], known: Any) -> None:
    for key in found:
        if key not in known:
            raise LoraplexError(f"{where} has unknown key {key!r}, known are {', '.join(known)}")


@functools.cache
def _tables(arch: str) -> list[tuple[str, Mapping[str, list[Mapping[str, Any]]]]]:
    found = []
    own = env.tuning_dir()
    shipped = resources.files("loraplex.tuning").joinpath("tables")
    for folder, file in (
        (own, f"{arch}.json"),
        (shipped, f"{arch}.json"),
        (shipped, "default.json"),
    ):
        path = folder.joinpath(file) if folder is not None else None
        if path is not None and path.is_file():
            name = str(path) if isinstance(folder, Path) and folder is own else file
            found.append((name, check_table(name, json.loads(path.read_text()))))
    return found
