"""README.md says what is true: its code runs, its numbers are those of the result files."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]


def blocks(language: str) -> list[str]:
    """The code blocks of README.md in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """benchmarks/readme_table.py."""
    path = ROOT / "benchmarks" / "readme_table.py"
    spec = importlib.util.spec_from_file_location("readme_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.hf
def test_example_prints_what_the_page_says() -> None:
    pytest.importorskip("transformers")
    (code,) = blocks("python")
    (wanted,) = blocks("text")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == wanted


def test_example_has_twelve_lines() -> None:
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) == 12


def test_numbers_are_those_of_the_result_file(script: ModuleType) -> None:
    text = README.read_text()
    assert script.with_numbers(text, script.numbers()) == text, "run benchmarks/readme_table.py"
    page = script.KERNEL_PAGE.read_text()
    assert script.with_numbers(page, script.peers()) == page, "run benchmarks/readme_table.py"
    page = script.POOL_PAGE.read_text()
    assert script.with_numbers(page, script.pool()) == page, "run benchmarks/readme_table.py"


def steps_content() -> dict[str, Any]:
    def row(key: str, ms: float | None) -> dict[str, Any]:
        graph = ms and {"median": ms, "p20": 0.9 * ms, "p80": 1.1 * ms}
        return {"key": key, "graph": graph, "floor_share": ms and 0.05 / ms}

    keys = {"base": 0.06, "matmul": 0.063, "serial": 0.09, "fused": None, "lora_linear": 0.0636}
    names = ("device", "driver", "torch", "triton", "commit", "command", "date")
    return {
        "header": {name: f"<{name}>" for name in names},
        "shape": {"m": 64, "k": 4096, "n": 28672, "r": 8, "dtype": "float16"},
        "rows": [row(key, ms) for key, ms in keys.items()],
    }


def test_table_is_made_from_a_result_file(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    assert "No measurements" in script.numbers(path)
    path.write_text(json.dumps(steps_content()))
    text = script.numbers(path)
    assert "| **`lora_linear`** | 63.6 (57.2 to 70.0) | 1.06 | 79% |" in text
    assert "wrong result" in text
    assert "`<command>` on <device>" in text


def test_markers_must_be_there(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="numbers:begin"):
        script.with_numbers("# a page without markers", "x")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    local = [link for link in links if not link.startswith(("http:", "https:"))]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_commands_of_the_page_are_those_of_the_program() -> None:
    from loraplex.cli.main import COMMANDS

    named = re.findall(r"^\| `loraplex (\w+)", README.read_text(), re.MULTILINE)
    assert set(named) == set(COMMANDS)
