"""``loraplex bench suite`` end to end: a rehearsal without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex.cli import suite
from loraplex.cli.main import main


@pytest.mark.interpreter
def test_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_path, page_path = tmp_path / "suite.json", tmp_path / "suite.html"
    command = ["bench", "suite", "--curves", "rank"]
    assert main([*command, "--json", str(json_path), "--html", str(page_path)]) == 0
    out = capsys.readouterr().out
    assert "No GPU here: a rehearsal" in out
    assert "no time" not in out
    content = json.loads(json_path.read_text())
    assert content["is_rehearsal"]
    assert content["header"]["commit"]
    assert content["model"]["name"] == "tiny"
    layers = {row["layer"] for row in content["rows"]}
    assert layers == {"qkv", "o", "gate_up", "down", "block"}
    assert {"base", "matmul", "merged", "lora_linear", "gemm_add", "serial"} <= {
        row["provider"] for row in content["rows"]
    }
    assert [point["x"] for point in content["curves"][0]["points"]] == [8, 16]
    assert "A rehearsal without a GPU" in page_path.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--curves", "speed"], "--curves must be of rank, .* got 'speed'"),
        (["--repeat", "0"], "--repeat must be at least 1, got 0"),
        (["--model", "nothing"], "got 'nothing'"),
    ],
)
def test_bad_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    assert main(["bench", "suite", *words]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("value", ["0", "-1", "x"])
@pytest.mark.parametrize("command", [["bench", "suite"], ["tune"]], ids="-".join)
def test_shards_are_whole_numbers_from_1(
    command: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--tp", value])
    assert stop.value.code == 2
    assert f"--tp: must be a whole number from 1, got {value!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("json", "", "--json must be a file, got the folder"),
        ("html", "", "--html must be a file, got the folder"),
        ("plot", "file", "--plot must be a folder, got the file"),
        ("plot", "file/deep", "--plot must be in a folder that can be written"),
    ],
)
def test_files_that_cannot_be_written_are_refused_first(
    name: str, path: str, message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(suite, "run_case", None)
    (tmp_path / "file").touch()
    assert main(["bench", "suite", f"--{name}", str(tmp_path / path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_decode_of_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8,
              "num_key_value_heads": 2, "num_hidden_layers": 4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["bench", "suite", "--model", str(tmp_path), "--cases", "decode", "--repeat", "3"]
    assert main([*words, "--html", str(tmp_path / "suite.html")]) == 0
    assert "us (tax)" in capsys.readouterr().out
    assert "TFLOP/s" in (tmp_path / "suite.html").read_text()
