"""Memory is NaN until somebody writes it, and the interpreter gets fewer programs to run."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
import torch

from loraplex.testing import poisoned_memory
from loraplex.tuning import choose

# A program costs the interpreter milliseconds, however little it does.
MOST_SPLITS, LEAST_RANKS = 2, 64


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.fixture(scope="module", autouse=True)
def _fewer_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The shipped table with less to loop over; ``shipped_tables`` takes it away again."""
    if torch.cuda.is_available():
        yield
        return
    shipped = resources.files("loraplex.tuning").joinpath("tables", "default.json")
    table = json.loads(shipped.read_text())
    for rules in table.values():
        for rule in rules if isinstance(rules, list) else ():
            for config in (value for value in rule.values() if isinstance(value, dict)):
                if "split_k" in config:
                    config["split_k"] = min(config["split_k"], MOST_SPLITS)
                if "block_r" in config:
                    config["block_r"] = max(config["block_r"], LEAST_RANKS)
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "cpu.json").write_text(json.dumps(table))
    with pytest.MonkeyPatch.context() as patch:
        use_tuning_dir(patch, folder)
        yield
    forget_tables()


@pytest.fixture
def shipped_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The block sizes that users get."""
    monkeypatch.delenv("LORAPLEX_TUNING_DIR", raising=False)
    forget_tables()
    yield
    forget_tables()


def use_tuning_dir(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("LORAPLEX_TUNING_DIR", str(folder))
    forget_tables()


def forget_tables() -> None:
    importlib.import_module("loraplex.tuning.choose")._tables.cache_clear()
    choose.cache_clear()
