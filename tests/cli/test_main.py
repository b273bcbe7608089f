"""The command line's frame: help, versions, errors, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from loraplex.cli import main as cli
from loraplex.errors import AdapterError
from loraplex.version import __version__

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"loraplex {__version__}"


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out = capsys.readouterr().out
    assert all(command in out for command in cli.COMMANDS)


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["frobnicate"])
    assert stop.value.code == 2
    assert "'frobnicate'" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"loraplex {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (AdapterError("no adapter in x:\n  nothing there"), "no adapter in x: nothing there"),
        (ValueError("m must be at least 1, got 0"), "m must be at least 1, got 0"),
        (FileNotFoundError(2, "No such file", "a.json"), "[Errno 2] No such file: 'a.json'"),
        (ImportError("needs pip install 'loraplex[hf]'"), "needs pip install 'loraplex[hf]'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_are_one_line(
    error: Exception,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _replace_command(monkeypatch, error)
    assert cli.main(["env"]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"loraplex env: {line}\n"
    assert captured.out == ""


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_command(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["env"])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "not enough memory."),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "not enough memory. CUDA out of me"),
    ],
)
def test_too_much_memory_is_one_line(
    error: Exception,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _replace_command(monkeypatch, error)
    assert cli.main(["env"]) == 2
    assert capsys.readouterr().err.startswith(f"loraplex env: {line}")


def test_too_much_memory_on_the_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    _replace_command(monkeypatch, caught.value)
    assert cli.main(["env"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("loraplex env: not enough memory. ")
    assert err.count("\n") == 1


def test_another_runtime_error_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_command(monkeypatch, RuntimeError("illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        cli.main(["env"])


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_command(monkeypatch, KeyboardInterrupt())
    assert cli.main(["env"]) == 130


def test_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m loraplex env | true"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False,
        env=ENVIRONMENT,
    )  # fmt: skip
    assert done.stderr == ""


def test_a_terminal_that_cannot_show_a_character_is_no_error() -> None:
    """Neither on the way out nor in a message of an error."""
    probe = (
        "import types; from loraplex.cli import env, main\n"
        "def run(args):\n"
        "    print('caf\\u00e9 \\u2500')\n"
        "    raise ValueError('na\\u00efve')\n"
        "command = types.SimpleNamespace(add_parser=env.add_parser, run=run)\n"
        "main._load = lambda name: command\n"
        "raise SystemExit(main.main(['env']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "caf\\xe9 \\u2500\n")
    assert done.stderr == "loraplex env: na\\xefve\n"


def test_only_the_command_that_runs_is_imported() -> None:
    probe = (
        "import sys; from loraplex.cli.main import main\n"
        "try: main(['env', '--help'])\n"
        "except SystemExit: pass\n"
        "loaded = [m for m in sys.modules if m.startswith('loraplex.cli.')]\n"
        "print(sorted(loaded), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True,
        env=ENVIRONMENT,
    )  # fmt: skip
    wanted = ["loraplex.cli.env", "loraplex.cli.main", "loraplex.cli.render"]
    assert done.stderr.strip() == str(wanted)


def test_env_tells_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    assert "torch implementations" in out
    assert "peer vllm" in out


def test_env_as_json(capsys: pytest.CaptureFixture[str], has_gpu: bool) -> None:
    assert cli.main(["env", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["header"]["loraplex"] == __version__
    assert bool(content["gpus"]) == has_gpu
    abilities = {ability["name"]: ability for ability in content["abilities"]}
    assert abilities["Triton kernels on the GPU"]["is_available"] == has_gpu
    assert all(ability["why"] for ability in content["abilities"])


def _replace_command(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """A command that fails in this way."""
    from loraplex.cli import env

    def run(args: object) -> int:
        raise error

    command = types.SimpleNamespace(add_parser=env.add_parser, run=run)
    monkeypatch.setattr(cli, "_load", lambda name: command)
