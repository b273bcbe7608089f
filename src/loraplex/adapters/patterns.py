"""Per-module values by name pattern, with PEFT's rule for ``rank_pattern``, ``alpha_pattern``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, TypeVar

V = TypeVar("V")


class PatternTable(Generic[V]):
    r"""First pattern that matches the end of a module path, at a dot or from the start.

    Semantics, as in PEFT::

        for pattern, value in patterns.items():  # in the order of the file
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        return patterns.get(name, default)  # a literal key that is no matching regex

    Raises:
        re.error: a pattern is not a regular expression.

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
        self._compiled = [
            (re.compile(rf"(.*\.)?({pattern})$"), value) for pattern, value in patterns.items()
        ]

    def find(self, name: str, default: V) -> V:
        """The value for module `name`."""
        for expression, value in self._compiled:
            if expression.match(name):
                return value
        return self._literal.get(name, default)
