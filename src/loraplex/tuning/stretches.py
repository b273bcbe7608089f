"""Where along the number of tokens the choice changes, for who wants to meet every choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from loraplex.tuning.choose import Choice, _tables, choose
from loraplex.tuning.problem import Problem


@dataclass(frozen=True)
class Stretch:
    """Numbers of tokens from ``first`` to ``last``, both included, that have one choice."""

    first: int
    last: int
    choice: Choice


def stretches(problem: Problem, max_tokens: int, impl: str = "") -> list[Stretch]:
    """The choices of 1 to ``max_tokens`` tokens, in order; neighbours differ in impl or configs.

    Args:
        problem: its ``m`` is not looked at.
        impl: only rules for this implementation, any if empty, as :func:`choose` takes it.

    Raises:
        UnsupportedImplError, LoraplexError: as :func:`choose`, if some number has no rule.

    Example:
        >>> from loraplex.tuning import Problem, stretches
        >>> found = stretches(Problem("matmul", 0, 4096, (4096,), arch="cpu"), 10_000)
        >>> found[0].first, found[-1].last
        (1, 10000)
    """
    found: list[Stretch] = []
    first = 1
    for last in _ends(problem, max_tokens):
        choice = choose(replace(problem, m=last), impl)
        if found and _is_same(found[-1].choice, choice):
            found[-1] = replace(found[-1], last=last)
        else:
            found.append(Stretch(first, last, choice))
        first = last + 1
    return found


def _ends(problem: Problem, max_tokens: int) -> list[int]:
    """Numbers after which a condition of a rule may come to hold or cease to, ascending."""
    ends = {end for end in _bounds(problem) if 1 <= end < max_tokens}
    return sorted(ends | ({max_tokens} if max_tokens >= 1 else set()))


def _bounds(problem: Problem) -> Iterator[int]:
    for _, rules in _tables(problem.arch):
        for rule in rules.get(problem.op, ()):
            when = rule.get("when", {})
            if "max_m" in when:
                yield when["max_m"]
            if "min_m" in when:
                yield when["min_m"] - 1
            if "max_adapters" in when:
                yield when["max_adapters"]


def _is_same(one: Choice, other: Choice) -> bool:
    return (one.impl, one.configs) == (other.impl, other.configs)
