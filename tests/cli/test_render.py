"""Tables without rich."""

from __future__ import annotations

import pytest

from loraplex.cli import render
from loraplex.cli.render import Column, format_table, print_table, progress


def test_columns_are_aligned() -> None:
    text = format_table(
        [Column("op"), Column("ms", is_number=True), Column("")],
        [["matmul", "0.5", "fast"], ["x", "12.25", ""]],
        title="times",
    )
    assert text.splitlines() == [
        "times",
        "op         ms",
        "------  -----  ----",
        "matmul    0.5  fast",
        "x       12.25",
    ]


def test_empty_table_has_its_heads() -> None:
    assert format_table([Column("a"), Column("b")], []) == "a  b\n-  -"


def test_print_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render, "has_rich", lambda: False)
    print_table([Column("a")], [["1"]])
    assert capsys.readouterr().out == "a\n-\n1\n"


def test_progress_is_silent_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(2) as bar:
        bar.start("one")
        bar.advance()
        bar.advance()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("has_rich", [True, False])
def test_progress_on_a_terminal(
    has_rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if has_rich:
        pytest.importorskip("rich")
    monkeypatch.setattr(render, "has_rich", lambda: has_rich)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress(1) as bar:
        bar.start("counting sheep")
        bar.advance()
    captured = capsys.readouterr()
    assert "counting sheep" in captured.err
    assert captured.out == ""
