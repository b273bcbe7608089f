"""Memory is NaN until somebody writes it, and the interpreter gets fewer programs to run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from loraplex.counters import PER_STREAM, counters_of
from loraplex.ops.kept import nothing_kept
from loraplex.testing import changed_blocks, poisoned_memory

# A program and a step cost the interpreter milliseconds, however little they do.
MOST_SPLITS, LEAST_RANKS = 2, 64


def fewer_programs(config: dict[str, int]) -> dict[str, int]:
    changed = dict(config)
    if "split_k" in config:
        changed["split_k"] = min(config["split_k"], MOST_SPLITS)
    if "block_r" in config:
        changed["block_r"] = max(config["block_r"], LEAST_RANKS)
    return changed


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.fixture(scope="module", autouse=True)
def _fewer_programs() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    with changed_blocks(fewer_programs):
        yield


@pytest.fixture
def shipped_tables() -> Iterator[None]:
    """The block sizes that users get."""
    if torch.cuda.is_available():
        yield
        return
    with changed_blocks(lambda config: config):
        yield


@pytest.fixture
def handed_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The counters that calls were given; as on a stream, every call is given the same ones."""
    given: list[Tensor] = []
    on_host = torch.zeros(PER_STREAM, dtype=torch.int32)

    def hand_out(device: torch.device, count: int) -> Tensor:
        row = counters_of(device, count) if device.type == "cuda" else on_host[:count]
        given.append(row[:PER_STREAM])
        return row

    module = importlib.import_module("loraplex.ops.fused")
    monkeypatch.setattr(module, "counters_of", hand_out)
    # a repeated call has what it needs at hand
    with nothing_kept():
        yield given
