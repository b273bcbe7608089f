"""The examples in docs/transformers.md and in the docstrings give what they say."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.hf
pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
MODULES = [
    "loraplex.demo.model",
    "loraplex.demo.proof",
    "loraplex.engines.transformers.generator",
    "loraplex.engines.transformers.requests",
    "loraplex.nn.attach",
    "loraplex.nn.model",
]


def test_the_page_prints_what_it_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, flags=re.DOTALL)
    assert code is not None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code[1], str(PAGE), "exec"), {})
    assert out.getvalue() == code[2]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
