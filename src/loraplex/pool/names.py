"""What may stand for an adapter."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from types import NoneType

UNFIT = frozenset(("Cc", "Cs", "Zl", "Zp"))
"""Unicode categories that no name has: controls, surrogates, line and paragraph separators."""


def check_name(name: object) -> str:
    """Require a non-empty string of one line, as it stands in messages, logs and requests."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if not name:
        raise ValueError("name must not be empty")
    strange = next((c for c in name if unicodedata.category(c) in UNFIT), None)
    if strange is not None:
        raise ValueError(
            f"name must have no control characters, line breaks or half characters, "
            f"got {strange!r} in {name!r:.80}"
        )
    return str(name)  # of a subclass, such as numpy's, just what it says


def check_names(names: Iterable[str | None]) -> list[str | None]:
    """Require strings and None, and not one string, which would count as its letters."""
    if isinstance(names, str):
        raise TypeError(f"names must be a sequence of names, got the single str {names!r}")
    if not isinstance(names, Iterable):
        raise TypeError(f"names must be a sequence of names, got {names!r:.80}")
    wanted = list(names)
    kinds: set[type] = {type(name) for name in wanted}
    strangers = {kind.__name__ for kind in kinds if not issubclass(kind, str | NoneType)}
    if strangers:
        raise TypeError(f"names must hold str and None, got {', '.join(sorted(strangers))}")
    return wanted
