"""Tables and progress bars of the command line: with rich if it is installed, plain if not."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Column:
    """One column of a table; numbers are aligned to the right."""

    title: str
    is_number: bool = False


class Progress(Protocol):
    """A bar that is told what is being done and when it is done."""

    def start(self, label: str) -> None:
        """Name what runs now."""

    def advance(self) -> None:
        """One unit is done."""


def has_rich() -> bool:
    """Whether rich (extra ``bench``) can be imported."""
    return importlib.util.find_spec("rich") is not None


def print_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    bad_rows: Sequence[int] = (),
) -> None:
    """Print a table to stdout; ``bad_rows`` are shown in red where there is colour."""
    if has_rich() and sys.stdout.isatty():
        _print_rich(columns, rows, title, bad_rows)
    else:
        print(format_table(columns, rows, title=title))


def format_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, title: str = ""
) -> str:
    """The plain form of a table: aligned columns, a rule under the heads.

    Example:
        >>> print(format_table([Column("op"), Column("ms", True)], [["matmul", "0.25"]]))
        op        ms
        ------  ----
        matmul  0.25
    """
    widths = [
        max(len(column.title), *(len(row[i]) for row in rows), 0)
        for i, column in enumerate(columns)
    ]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for cell, width, column in zip(cells, widths, columns, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    heads = line([column.title for column in columns])
    rule = "  ".join("-" * width for width in widths).rstrip()
    return "\n".join([*([title] if title else []), heads, rule, *(line(row) for row in rows)])


def _print_rich(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], title: str, bad_rows: Sequence[int]
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Text, since a plain str would be read as markup: "[/x]" and ":key:" are cells like others.
    table = Table(title=Text(title) if title else None, box=SIMPLE_HEAD, title_justify="left")
    for column in columns:
        table.add_column(Text(column.title), justify="right" if column.is_number else "left")
    for number, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold red" if number in bad_rows else None)
    Console().print(table)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Progress]:
    """A progress bar on stderr while the body runs; silent where stderr is no terminal."""
    if not has_rich() or not sys.stderr.isatty():
        yield _PlainProgress(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichBar

    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(bar_width=36),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with RichBar(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _RichProgress(bar, bar.add_task("", total=total))


class _RichProgress:
    def __init__(self, bar: object, task: object) -> None:
        self._bar, self._task = bar, task

    def start(self, label: str) -> None:
        self._bar.update(self._task, description=label)  # type: ignore[attr-defined]

    def advance(self) -> None:
        self._bar.advance(self._task)  # type: ignore[attr-defined]


class _PlainProgress:
    """A line that is rewritten on a terminal without rich; nothing in a log file."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._is_terminal = sys.stderr.isatty()

    def start(self, label: str) -> None:
        if self._is_terminal:
            sys.stderr.write(f"\r[{self._done}/{self._total}] {label:<60}")
            sys.stderr.flush()

    def advance(self) -> None:
        self._done += 1
        if self._is_terminal and self._done == self._total:
            sys.stderr.write("\r" + " " * 78 + "\r")
