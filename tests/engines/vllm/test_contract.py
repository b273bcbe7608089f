"""The plugin's picture of vLLM against the sources of its releases."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from loraplex.engines.vllm import interface
from loraplex.engines.vllm.expected import EXPECTED, Expected
from loraplex.engines.vllm.interface import find_problems
from loraplex.engines.vllm.support import FIRST, LAST, why_not_version

OLDEST = f"{FIRST[0]}.{FIRST[1]}.0"
LATEST = f"{LAST[0]}.{LAST[1]}.0"
TOO_OLD = "0.20.0"
Sources = Callable[[str], Path]


@pytest.mark.parametrize("version", [OLDEST, LATEST])
def test_supported_release_is_as_expected(vllm_package: Sources, version: str) -> None:
    assert find_problems(vllm_package(version)) == []


def test_newest_release(vllm_package: Sources) -> None:
    """A release that came out since is reported, for somebody to read; nobody is served it yet."""
    package = vllm_package("newest")
    problems = find_problems(package)
    if why_not_version(package.name):
        found = "; ".join(problems or ["no difference: support it?"])
        warnings.warn(f"vLLM {package.name}: {found}", stacklevel=1)
    else:
        assert problems == []


def test_old_release_is_told_apart(vllm_package: Sources) -> None:
    assert why_not_version(TOO_OLD)
    assert find_problems(vllm_package(TOO_OLD))


@pytest.mark.parametrize("want", EXPECTED, ids=lambda want: want.name)
def test_each_difference_is_found(
    want: Expected, vllm_package: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renaming any one thing that the plugin relies on shows, and so does each changed line."""
    monkeypatch.setattr(interface, "EXPECTED", (want,))
    package = vllm_package(OLDEST)
    (name,) = (file for file in want.files if (package / file).is_file())
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    text = (package / name).read_text("utf-8")
    file.write_text(text)
    assert find_problems(tmp_path) == []
    last = want.name.rpartition(".")[2]
    file.write_text(text.replace(last, f"{last}x"))
    assert any(want.name in problem for problem in find_problems(tmp_path))
    file.unlink()
    assert find_problems(tmp_path) == [f"there is no {want.files[-1]}"]


def test_changed_lines_are_found(vllm_package: Sources, tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    original = vllm_package(OLDEST)
    for file in {file for want in EXPECTED for file in want.files}:
        if (original / file).is_file():
            (package / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(original / file, package / file)
    layers = package / "lora/layers/base_linear.py"
    layers.write_text(layers.read_text().replace("        self.reset_lora(index)\n", ""))
    column = package / "lora/layers/column_parallel_linear.py"
    text = column.read_text().replace(
        "class MergedQKVParallelLinearWithLoRA(MergedColumnParallelLinearWithLoRA):",
        "class MergedQKVParallelLinearWithLoRA(MergedColumnParallelLinearWithLoRA):\n"
        "    def apply(self, x, bias=None): return x",
    )
    column.write_text(text)
    assert find_problems(package) == [
        "lora/layers/base_linear.py: BaseLinearLayerWithLoRA.set_lora no longer says "
        "`self.reset_lora(index)`",
        "lora/layers/column_parallel_linear.py: MergedQKVParallelLinearWithLoRA says `def apply`",
    ]
