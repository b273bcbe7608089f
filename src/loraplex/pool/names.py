"""What may stand for an adapter."""

from __future__ import annotations

from collections.abc import Iterable


def check_name(name: object) -> None:
    """Require a non-empty string."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if not name:
        raise ValueError("name must not be empty")


def check_names(names: Iterable[str | None]) -> list[str | None]:
    """Require strings and None, and not one string, which would count as its letters."""
    if isinstance(names, str):
        raise TypeError(f"names must be a sequence of names, got the single str {names!r}")
    wanted = list(names)
    strangers = {type(name).__name__ for name in wanted} - {"str", "NoneType"}
    if strangers:
        raise TypeError(f"names must hold str and None, got {', '.join(sorted(strangers))}")
    return wanted
