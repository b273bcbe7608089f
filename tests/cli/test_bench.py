"""``loraplex bench steps`` end to end, small."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from torch import Tensor

import loraplex as lp
from loraplex.cli import bench
from loraplex.cli.main import main

SMALL = ["--m", "5", "--k", "64", "--n", "96", "--r", "4", "--warmup", "1", "--repeat", "2"]


def test_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str], has_gpu: bool) -> None:
    pytest.importorskip("matplotlib")
    json_path, plot_path = tmp_path / "steps.json", tmp_path / "steps.png"
    command = ["bench", "steps", *SMALL, "--json", str(json_path), "--plot", str(plot_path)]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "M=5 K=64 N=96 R=4" in out
    assert ("No GPU here" in out) != has_gpu
    assert ("(interpreter)" in out) != has_gpu

    content = json.loads(json_path.read_text())
    assert content["shape"] == {"m": 5, "k": 64, "n": 96, "r": 4, "dtype": "float16"}
    assert content["timing"] == {"warmup": 1, "repeat": 2, "unit": "ms"}
    rows = {row["key"]: row for row in content["rows"]}
    serial = ["shrink", "expand", "base", "add", "sum", "serial"]
    host = [] if has_gpu else ["lora_linear_torch"]
    assert list(rows) == [*serial, *host, "matmul", "fused", "lora_linear"]
    for key in ("base", "serial", *host, "matmul", "fused", "lora_linear"):
        assert rows[key]["verdict"]["is_correct"]
        assert rows[key]["eager"]["median"] > 0
        assert (rows[key]["graph"] is not None) == has_gpu
        assert (rows[key]["floor_share"] is not None) == has_gpu
    assert rows["matmul"]["against"] == "base"
    assert rows["serial"]["ratio"] == 1.0
    assert plot_path.read_bytes().startswith(b"\x89PNG")


def test_wrong_result_has_no_time_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = lp.fused_matmul_expand

    def wrong(x: Tensor, c: Tensor, y: Tensor, b: Tensor, impl: str = "auto") -> Tensor:
        o = right(x, c, y, b, impl="torch")
        o[2, 7] += 1
        return o

    monkeypatch.setattr(lp, "fused_matmul_expand", wrong)
    path = tmp_path / "steps.json"
    assert main(["bench", "steps", *SMALL, "--dtype", "float32", "--json", str(path)]) == 1
    row = next(r for r in json.loads(path.read_text())["rows"] if r["key"] == "fused")
    assert row["verdict"]["position"] == [2, 7]
    assert row["verdict"]["max_error"] == pytest.approx(1, abs=1e-3)
    assert row["eager"] is None
    assert row["graph"] is None
    assert row["tflops"] is None
    out = capsys.readouterr().out
    assert "WRONG: largest error 1" in out
    assert "No summary: a result is wrong." in out


@pytest.mark.parametrize("value", ["0", "-8", "1.5", "many", "", "99999999999999999999"])
@pytest.mark.parametrize("name", ["m", "k", "n", "r", "repeat"])
def test_sizes_must_be_positive(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "steps", f"--{name}", value])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert f"argument --{name}: must be a whole number from 1, got {value!r}" in captured.err
    assert captured.out == ""


def test_warmup_may_be_0_but_not_less(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "steps", *SMALL, "--warmup", "0"]) == 0
    with pytest.raises(SystemExit):
        main(["bench", "steps", "--warmup", "-1"])
    assert "argument --warmup: must be a whole number from 0, got '-1'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plot", "x.foo"], "--plot must end in .png, .svg, .pdf, got 'x.foo'"),
        (["--plot", "x"], "--plot must end in .png, .svg, .pdf, got 'x'"),
        (["--plot", "FOLDER"], "--plot must end in .png, .svg, .pdf, got"),
        (["--plot", "FOLDER.png"], "--plot must be a file, got the folder"),
        (["--json", "FOLDER"], "--json must be a file, got the folder"),
        (["--json", "FILE/x.json"], "--json must be in a folder that can be written, got"),
        (["--plot", "FILE/deep/x.png"], "--plot must be in a folder that can be written, got"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(
    words: list[str], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def measure(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(bench, "run_ladder", measure)
    (tmp_path / "FILE").touch()
    for name in ("FOLDER", "FOLDER.png"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "steps", *words]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["FILE", "FOLDER", "FOLDER.png"]


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "run_ladder", None)
    assert main(["bench", "steps", "--plot", "x.png"]) == 2
    assert "--plot needs matplotlib: pip install 'loraplex[bench]'" in capsys.readouterr().err


@pytest.mark.interpreter
def test_bfloat16_is_refused_in_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "steps", "--dtype", "bfloat16"]) == 2
    assert "bfloat16" in capsys.readouterr().err
