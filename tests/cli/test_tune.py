"""``loraplex tune`` end to end: a rehearsal without a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.bench import tune as measuring
from loraplex.bench.layers_batch import Batch
from loraplex.bench.tune_journal import Result
from loraplex.cli import tune
from loraplex.cli.main import main
from loraplex.tuning.choose import check_table


@pytest.mark.interpreter
def test_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "No GPU here: a rehearsal" in out
    assert "1 of 1 layers have a right candidate" in out
    table = check_table("cpu.json", json.loads((tmp_path / "cpu.json").read_text()))
    assert "rehearsed" in table["lora_linear"][0]["note"]
    assert main(["tune", "--out", str(tmp_path), "--resume"]) == 0
    assert "2 candidates, 0 to measure" in capsys.readouterr().out


@pytest.mark.interpreter
def test_interrupted_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["tune", "--out", str(tmp_path)]
    measure, names = measuring._measure, []

    def interrupt(batch: Batch, name: str, *rest: Any) -> Result:
        names.append(name)
        if len(names) == 3:
            raise KeyboardInterrupt
        return measure(batch, name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "_measure", interrupt)
        assert main(words) == 130
    assert "go on with --resume" in capsys.readouterr().out
    assert not (tmp_path / "cpu.json").exists()
    assert main([*words, "--resume"]) == 0
    assert "2 candidates, 1 to measure" in capsys.readouterr().out
    assert (tmp_path / "cpu.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--m", "1,x"], "--m must be positive whole numbers, got 'x'"),
        (["--m", "0"], "--m must be positive whole numbers, got '0'"),
        (["--m", ""], "--m must be positive whole numbers, got ''"),
        (["--layers", ""], "--layers must be of qkv, o, gate_up, down, got ''"),
        (["--out", __file__], "--out must be a folder, got the file"),
        (["--rank", "0"], "--rank must be at least 1, got 0"),
        (["--rank", "12"], "--rank must be a multiple of 8, got 12"),
        (["--layers", "qkv,up"], "--layers must be of qkv, o, gate_up, down, got 'up'"),
        (["--model", "nothing"], "got 'nothing'"),
    ],
)
def test_bad_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err


def test_batches_of_a_model() -> None:
    parser = argparse.ArgumentParser()
    tune.add_parser(parser.add_subparsers())
    args = parser.parse_args(["tune", "--m", "64,1", "--layers", "o,down", "--dtype", "float16"])
    batches = tune.make_batches(args, has_gpu=True)
    assert [(b.layer.name, b.m, b.adapters, b.num_slots) for b in batches] == [
        ("o", 1, 1, 8), ("o", 64, 8, 8), ("down", 1, 1, 8), ("down", 64, 8, 8),
    ]  # fmt: skip
    assert {batch.dtype for batch in batches} == {torch.float16}


@pytest.mark.gpu
def test_tunes_a_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "--layers", "o", "--m", "16", "--out", str(tmp_path), "--workers", "8"]
    assert main(words) == 0
    assert "gemm_add us" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    assert check_table(path.name, json.loads(path.read_text()))["lora_linear"]
