"""Other block sizes than the shipped ones, for a while."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from loraplex import env
from loraplex.tuning.choose import _tables, choose


@contextmanager
def tuning_table(table: Mapping[str, Any]) -> Iterator[None]:
    """Inside, this table decides before the shipped ones, for the GPU here or for host tensors."""
    arch = env.gpu_arch(0) if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{arch}.json").write_text(json.dumps(table))
        with mock.patch.object(env, "tuning_dir", return_value=Path(folder)):
            _forget()
            try:
                yield
            finally:
                _forget()


@contextmanager
def changed_blocks(change: Callable[[dict[str, int]], dict[str, int]]) -> Iterator[None]:
    """Inside, the default table decides, with every kernel's config passed through ``change``."""
    shipped = resources.files("loraplex.tuning").joinpath("tables").joinpath("default.json")
    table = json.loads(shipped.read_text())
    for rules in table.values():
        for rule in rules if isinstance(rules, list) else ():
            for name, value in rule.items():
                if isinstance(value, dict) and name != "when":
                    rule[name] = change(value)
    with tuning_table(table):
        yield


def _forget() -> None:
    _tables.cache_clear()
    choose.cache_clear()
