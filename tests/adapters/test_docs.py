"""The examples of docs/adapters.md and of the docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch

import loraplex.adapters

DOCS = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"
FLAGS = doctest.ELLIPSIS
MODULES = sorted(module.name for module in pkgutil.iter_modules(loraplex.adapters.__path__))


@pytest.mark.hf
def test_examples_of_the_page(tiny: Any) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    plain = tiny.train(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], rank_pattern={"q_proj": 4},
        with_logits=False,
    )  # fmt: skip
    plain.edit_config(base_model_name_or_path="org/tiny-llama")
    plain.edit_tensors(lambda tensors: {n: t.bfloat16() for n, t in tensors.items()})
    dora = tiny.train(use_dora=True, with_logits=False)
    names = {"folder": plain.path, "dora_folder": dora.path, "torch": torch}
    example = doctest.DocTestParser().get_doctest(
        DOCS.read_text(), names, DOCS.name, str(DOCS), 0
    )  # fmt: skip
    assert len(example.examples) > 12
    failed, _ = doctest.DocTestRunner(optionflags=FLAGS).run(example)
    assert failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_the_docstrings(name: str) -> None:
    module = importlib.import_module(f"loraplex.adapters.{name}")
    assert doctest.testmod(module, optionflags=FLAGS).failed == 0
