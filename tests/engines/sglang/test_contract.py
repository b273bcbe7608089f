"""The plugin's picture of SGLang against the sources of its releases, read from the wheel."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path

import pytest

from loraplex.engines.sglang import interface
from loraplex.engines.sglang.expected import EXPECTED, Expected
from loraplex.engines.sglang.interface import find_problems
from loraplex.engines.sglang.support import SUPPORTED

CACHE = Path.home() / ".cache" / "loraplex-tests" / "sglang"
FILES = sorted({want.file for want in EXPECTED})
# The last release whose backends still computed base and LoRA apart.
TOO_OLD = "0.5.22"


def skip_loudly(reason: str) -> None:
    """Skips are easily missed; a warning stands in the summary of every run."""
    warnings.warn(f"no SGLang sources, contract not tested: {reason}", stacklevel=2)
    pytest.skip(reason)


def pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        skip_loudly("pip took longer than 300 s")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        skip_loudly(f"pip {arguments[0]} failed: {(lines or ['no reason given'])[-1][:200]}")
    return done.stdout


def sources(version: str) -> Path:
    """The files that the plugin relies on, of one release; kept from run to run."""
    # other files than an earlier version of this test wanted
    folder = CACHE / f"{version}-{zlib.crc32(repr(FILES).encode()):08x}"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as room:
            pip(
                "download",
                f"sglang=={version}",
                "--no-deps",
                "--no-binary=:none:",
                "-q",
                "-d",
                room,
            )
            (wheel,) = Path(room).glob("*.whl")
            unpacked = Path(room) / "unpacked"
            with zipfile.ZipFile(wheel) as archive:
                there = set(archive.namelist())
                for name in FILES:
                    if f"sglang/{name}" in there:
                        archive.extract(f"sglang/{name}", unpacked)
            try:
                unpacked.rename(folder)
            except OSError:
                assert folder.is_dir()  # another process was quicker
    return folder / "sglang"


@pytest.mark.parametrize("version", SUPPORTED)
def test_supported_release_is_as_expected(version: str) -> None:
    assert find_problems(sources(version)) == []


def test_release_before_is_told_apart() -> None:
    problems = find_problems(sources(TOO_OLD))
    assert any("triton_v2_backend.py cannot be read" in problem for problem in problems)


def test_newest_release() -> None:
    """A release that came out since is reported, for somebody to read; nothing breaks by it."""
    report = pip("install", "sglang", "--dry-run", "--no-deps", "--ignore-installed", "-q",
                 "--report", "-")  # fmt: skip
    newest = json.loads(report)["install"][0]["metadata"]["version"]
    if newest not in SUPPORTED:
        problems = find_problems(sources(newest)) or ["no difference: support it?"]
        warnings.warn(f"SGLang {newest}: " + "; ".join(problems), stacklevel=1)
    assert newest


@pytest.mark.parametrize("want", EXPECTED, ids=lambda want: want.name)
def test_each_difference_is_found(
    want: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renaming any one thing that the plugin relies on shows."""
    monkeypatch.setattr(interface, "EXPECTED", (want,))
    file = tmp_path / want.file
    file.parent.mkdir(parents=True)
    text = (sources(SUPPORTED[0]) / want.file).read_text()
    file.write_text(text)
    assert find_problems(tmp_path) == []
    last = want.name.rpartition(".")[2]
    file.write_text(text.replace(last, f"{last}x"))
    assert any(want.name in problem for problem in find_problems(tmp_path))


def test_changed_code_is_found(tmp_path: Path) -> None:
    original = sources(SUPPORTED[0])
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((original / file).read_text())
    pool = tmp_path / "srt/lora/mem_pool.py"
    pool.write_text(pool.read_text().replace(": lora_rank * c, :", ": lora_rank, :"))
    assert find_problems(tmp_path) == [
        "srt/lora/mem_pool.py: LoRAMemoryPool.load_lora_weight_to_buffer no longer says "
        "`target_buffer[buffer_id, :lora_rank * c, :]`"
    ]
