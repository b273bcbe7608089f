"""Every choice that some number of tokens gets is met at the end of a stretch."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.errors import UnsupportedImplError
from loraplex.tuning import Choice, Problem, choose, stretches
from loraplex.tuning.choose import OPS

module = importlib.import_module("loraplex.tuning.choose")
MOST = 5000  # past every bound of the shipped tables
LAYERS = [(4096, (4096, 1024, 1024)), (4096, (14336, 14336)), (14336, (4096,)), (64, (48,))]


def what(choice: Choice) -> str:
    return json.dumps([choice.impl, choice.configs], sort_keys=True)


def problems() -> Iterator[Problem]:
    for op in OPS:
        for arch in ("sm_90", "sm_80"):
            for k, slices in LAYERS:
                for rank, slots in ((16, 4), (64, 64)):
                    for dtype, is_aligned in (("bfloat16", True), ("float16", False)):
                        yield Problem(op, 0, k, slices, slots, rank, dtype, arch, is_aligned)
            yield Problem(op, 0, 4096, (4096,), 8, 16, "float32", arch)


@pytest.mark.parametrize("problem", list(problems()), ids=str)
def test_stretches_are_what_asking_every_number_finds(problem: Problem) -> None:
    every = [what(choose.__wrapped__(replace(problem, m=m))) for m in range(1, MOST + 1)]
    found = stretches(problem, MOST)
    assert {what(s.choice) for s in found} == set(every)
    assert [what(s.choice) for s in found for _ in range(s.first, s.last + 1)] == every
    # the end of a stretch is where it is met
    assert {every[s.last - 1] for s in found} == set(every)
    assert all(what(a.choice) != what(b.choice) for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("most", [0, 1, 16, 17, 64, 100])
def test_no_number_past_the_largest(most: int) -> None:
    problem = Problem("lora_linear", 0, 4096, (4096,), 8, 16)
    found = stretches(problem, most)
    assert [m for s in found for m in range(s.first, s.last + 1)] == list(range(1, most + 1))


@pytest.fixture
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LORAPLEX_TUNING_DIR", str(tmp_path))
    yield tmp_path / "sm_90.json"
    module._tables.cache_clear()
    choose.cache_clear()


def test_own_table_counts_too(own_table: Path) -> None:
    def rule(impl: str, **when: Any) -> dict[str, Any]:
        return {"impl": impl, "when": when}

    rules = [
        rule("odd", min_m=100, max_m=110),
        rule("other", min_m=105, max_m=120, dtype=["float32"]),
        rule("small", max_m=104),
        rule("odd", max_m=115),
        rule("small", max_m=200),
        rule("odd", max_m=200),
    ]
    own_table.write_text(json.dumps({"lora_linear": rules}))
    module._tables.cache_clear()
    choose.cache_clear()
    problem = Problem("lora_linear", 0, 4096, (4096,), 8, 16)
    found = [(s.first, s.last, s.choice.impl) for s in stretches(problem, 200)]
    assert found == [(1, 99, "small"), (100, 115, "odd"), (116, 200, "small")]
    assert [s.last for s in stretches(problem, 200, "small")] == [200]
    with pytest.raises(UnsupportedImplError):
        stretches(problem, 201, "small")
