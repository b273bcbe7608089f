"""Every example in a docstring runs, and every public function of the package has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import loraplex as lp

MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(lp.__path__, "loraplex.")
    if not found.name.endswith("__main__") and ".engines." not in found.name
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    outcome = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert outcome.failed == 0


PUBLIC = [name for name in lp.__all__ if inspect.isfunction(getattr(lp, name))]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_have_an_example(name: str) -> None:
    text = inspect.getdoc(getattr(lp, name)) or ""
    assert "Example" in text
    assert ">>> " in text


def test_there_are_public_functions() -> None:
    assert {"lora_linear", "add_lora_", "multi_lora", "matmul"} <= set(PUBLIC)
