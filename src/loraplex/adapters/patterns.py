"""Per-module values by name pattern, with PEFT's rule for ``rank_pattern``, ``alpha_pattern``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from loraplex.adapters.name_regex import UnsupportedPatternError, compile_name_regex

V = TypeVar("V")
# Without these nothing in a pattern repeats or branches, and re, which is faster, tries it once.
BRANCHING = frozenset("*+?{|(")


class PatternTable(Generic[V]):
    r"""First pattern that matches the end of a module path, at a dot or from the start.

    Semantics, as in PEFT::

        for pattern, value in patterns.items():  # in the order of the file
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        return patterns.get(name, default)  # a literal key that is no matching regex

    No pattern takes more than a bounded time on a name, whatever it repeats.

    Raises:
        ValueError: a pattern is not a regular expression; names it.
        UnsupportedPatternError: it looks behind, refers to groups, or the like.

    Example:
        >>> table = PatternTable({"q_proj": 4, r"layers\.1\..*": 2})
        >>> table.find("model.layers.1.self_attn.q_proj", 8)
        4
        >>> table.find("model.layers.1.mlp.up_proj", 8), table.find("model.my_q_proj", 8)
        (2, 8)
    """

    def __init__(self, patterns: Mapping[str, V]) -> None:
        self._literal = dict(patterns)
        # Compiled once: a file with a pattern per module overflows re's own cache.
        self._compiled = [(_matcher(pattern), value) for pattern, value in patterns.items()]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._literal,)

    def find(self, name: str, default: V) -> V:
        """The value for module `name`.

        Raises:
            UnsupportedPatternError: a pattern takes too long on that name.
        """
        for is_match, value in self._compiled:
            if is_match(name):
                return value
        return self._literal.get(name, default)


def _matcher(pattern: str) -> Callable[[str], object]:
    """Something that is true for a name that the pattern matches, as PEFT asks it."""
    whole = rf"(.*\.)?({pattern})$"
    try:
        if not BRANCHING.intersection(pattern):
            return re.compile(whole).match
        is_match = compile_name_regex(whole)
    except UnsupportedPatternError as error:
        raise UnsupportedPatternError(_about(pattern, error)) from None
    except (re.error, OverflowError, RecursionError) as error:
        reason = error.msg if isinstance(error, re.error) else error
        raise ValueError(f"{pattern!r:.200} is no regular expression: {reason}") from None

    def find(name: str) -> bool:
        try:
            return is_match(name)
        except UnsupportedPatternError as error:
            raise UnsupportedPatternError(_about(pattern, error)) from None

    return find


def _about(pattern: str, error: UnsupportedPatternError) -> str:
    return (
        f"the pattern {pattern!r:.200} is not supported: {error}; list the modules' names instead"
    )
