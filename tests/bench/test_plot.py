"""The picture of the ladder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loraplex.bench.ceilings import Ceilings
from loraplex.bench.layer import Shape
from loraplex.bench.steps import Ladder, Row, rungs
from loraplex.bench.timing import Timing

pytest.importorskip("matplotlib")

HEADER = {"torch": "2", "triton": "3", "commit": "abc", "date": "2026-01-01"}


def rows_of(shape: Shape, *, is_gpu: bool) -> Iterator[Row]:
    for number, rung in enumerate(rungs(shape, "fused", is_gpu=is_gpu)):
        timing = Timing(0.1 + number, 0.09 + number, 0.12 + number)
        yield Row(
            rung.key, rung.label, rung.group, timing, timing if is_gpu else None, rung.against,
            None, rung.is_interpreted, floor_ms=0.05 if is_gpu else None,
        )  # fmt: skip


@pytest.fixture
def ladder() -> Ladder:
    shape = Shape(64, 4096, 28672, 8, torch.float16)
    rows = list(rows_of(shape, is_gpu=True))
    return Ladder(shape, "Some GPU", True, 2, Ceilings(1e12, 1e15), rows)


def texts_of(path: Path) -> str:
    """Text of an SVG whose letters are kept as letters."""
    return path.read_text()


def draw(ladder: Ladder, path: Path) -> str:
    import matplotlib as mpl

    from loraplex.bench.plot import save_plot

    with mpl.rc_context({"svg.fonttype": "none"}):
        save_plot(ladder, HEADER, path)
    return texts_of(path)


def test_names_times_and_floor_are_in_the_picture(ladder: Ladder, tmp_path: Path) -> None:
    text = draw(ladder, tmp_path / "ladder.svg")
    for word in ("lora_linear", "one by one, torch", "byte floor 0.05 ms", "Some GPU", "rank 8"):
        assert word in text


def test_wrong_result_has_a_note_instead_of_a_bar(ladder: Ladder, tmp_path: Path) -> None:
    rows = [
        replace(row, eager=None, graph=None) if row.key == "fused" else row for row in ladder.rows
    ]
    text = draw(replace(ladder, rows=rows), tmp_path / "ladder.svg")
    assert text.count("wrong result, no time") == 1


def test_interpreter_has_no_bars(tmp_path: Path) -> None:
    shape = Shape(8, 64, 96, 4, torch.float16)
    rows = list(rows_of(shape, is_gpu=False))
    text = draw(Ladder(shape, "CPU", False, 1, None, rows), tmp_path / "ladder.svg")
    assert text.count("right in the interpreter") == 3
    assert "byte floor" not in text


def test_without_matplotlib_the_error_names_the_extra(
    ladder: Ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from loraplex.bench.plot import save_plot

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"loraplex\[bench\]"):
        save_plot(ladder, HEADER, tmp_path / "x.png")
