"""The parts of ``loraplex tune``: candidates, workers, journal, rules."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loraplex.bench import tune as tune_module
from loraplex.bench.layers import Layer, find_model
from loraplex.bench.layers_batch import Batch, answers, make_sets
from loraplex.bench.tune import FINAL, Search, tune
from loraplex.bench.tune_candidates import (
    Candidate,
    first_round,
    second_round,
    third_round,
)
from loraplex.bench.tune_journal import Journal, Result
from loraplex.bench.tune_table import NOTE, Winner, make_rules, write_table
from loraplex.bench.tune_workers import run_all
from loraplex.errors import LoraplexError
from loraplex.tuning import Problem, choose
from loraplex.tuning.choose import _tables, check_table

SIZES = (1, 16, 64, 256, 4096)
GATE_UP = Layer("gate_up", 4096, (14336, 14336))
TINY = Layer("o", 64, (48,))
SHRINK = {"block_r": 16, "block_k": 16, "lanes": 2, "split_k": 1, "num_warps": 4, "num_stages": 2}
EXPAND = {"block_m": 16, "block_n": 64, "block_r": 16, "lora_stages": 2, "num_warps": 4,
          "num_stages": 2}  # fmt: skip


def model_batches() -> list[Batch]:
    return [
        Batch(layer, m, min(m, 8), 16, torch.bfloat16, slots=8)
        for name in ("llama-3-8b", "llama-3-70b-tp8", "qwen3-32b")
        for layer in find_model(name).layers
        for m in SIZES
    ]


@pytest.mark.parametrize("batch", model_batches(), ids=lambda batch: batch.key)
def test_candidates_are_rules_and_few(batch: Batch) -> None:
    opening = first_round(batch, 132, "sm_90")
    best = opening[0]
    every = [*opening, *second_round(batch, best), *second_round(batch, opening[-1])]
    check_table("t", {"lora_linear": [{"impl": c.impl, **c.configs} for c in every]})
    assert len({candidate.key for candidate in opening}) == len(opening)
    assert {candidate.impl for candidate in opening} == {"fused", "gemm_add"}
    assert 5 <= len(opening) <= 48
    assert len(every) <= 85
    assert best.key not in {candidate.key for candidate in second_round(batch, best)}


def test_k_is_split_only_where_tiles_are_few() -> None:
    def splits(layer: Layer, m: int) -> set[int]:
        found = first_round(Batch(layer, m, 1, 16, torch.bfloat16), 132, "sm_80")
        return {c.configs["linear"]["split_k"] for c in found if c.impl == "fused"}

    assert splits(Layer("o", 4096, (4096,)), 1) == {1, 2, 3}
    assert splits(GATE_UP, 4096) == {1}


def test_descriptors_only_where_there_is_a_copy_engine() -> None:
    batch = Batch(GATE_UP, 1024, 4, 16, torch.bfloat16)

    def uses(arch: str) -> set[int]:
        found = first_round(batch, 132, arch)
        return {c.configs["linear"]["has_descriptor"] for c in found if c.impl == "fused"}

    assert uses("sm_80") == uses("gfx942") == {0}
    assert uses("sm_90") == uses("sm_100") == {0, 1}


@pytest.mark.parametrize("m", SIZES)
def test_the_wide_shrink_is_for_many_rows(m: int) -> None:
    batch = Batch(GATE_UP, m, 1, 16, torch.bfloat16)
    opening = first_round(batch, 132, "sm_90")
    # a candidate replaces the shrink of another as a whole, so that all have the key
    found = {c.configs["shrink"]["is_wide"] for c in second_round(batch, opening[-1])}
    assert found == ({0, 1} if m > 64 else {0})


def test_third_round_takes_the_best_of_every_setting() -> None:
    linear = {"block_m": 64, "block_n": 64, "block_r": 32, "lora_stages": 2}
    best = Candidate("fused", {"shrink": SHRINK, "linear": linear})
    ahead = [
        best.changed("shrink", {"lanes": 4, "block_k": 64}),
        best.changed("linear", {"block_r": 128}),
        best.changed("shrink", {"lanes": 8, "num_warps": 8}),
        best.changed("linear", {"block_r": 64}),
    ]
    (together,) = third_round(best, ahead)
    assert together.configs["shrink"] == {**SHRINK, "lanes": 4, "block_k": 64}
    assert together.configs["linear"] == {**linear, "block_r": 128}
    assert third_round(best, ahead[:1]) == []
    assert third_round(best, []) == []


def behave(task: str) -> None:
    """What a compiling process may do; called in a fresh one."""
    if task == "raise":
        raise RuntimeError("out of\n shared memory")
    if task == "break":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if task == "die":
        os._exit(11)
    if task == "hang":
        time.sleep(60)


def test_workers_survive_what_tasks_do() -> None:
    tasks = ["fine", "die", "raise", "break", "fine", "fine"]
    told: dict[int, str] = {}
    reasons = run_all(
        behave,
        tasks,
        workers=2,
        timeout=120,
        on_done=lambda number, why: told.update({number: why}),
    )
    assert reasons == [
        "", "its process died", "RuntimeError: out of shared memory",
        "RuntimeError: CUDA error: an illegal memory access was encountered", "", "",
    ]  # fmt: skip
    assert told == dict(enumerate(reasons))


def test_task_that_hangs_is_given_up() -> None:
    assert run_all(behave, ["hang"], workers=1, timeout=1) == ["took more than 1 s"]


def test_no_tasks_need_no_workers() -> None:
    assert run_all(behave, [], workers=2, timeout=1) == []


IDENTITY = {"arch": "sm_90", "torch": "2"}


def test_journal_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "new" / "j.jsonl"
    journal = Journal(path, IDENTITY, resume=True)
    journal.put(Result("b", "slow", 2.0))
    journal.put(Result("b", "none", None, "failed: no"))
    journal.put(Result("b", "fast", 1.0))
    journal.put(Result("other", "fast", 0.5))
    path.write_text(path.read_text() + '{"batch": "b", "candi')  # killed while it wrote
    again = Journal(path, IDENTITY, resume=True)
    assert [result.candidate for result in again.results("b")] == ["fast", "slow", "none"]
    again.put(Result("b", "late", 3.0))
    found = Journal(path, IDENTITY, resume=True).get("b", "late")
    assert found == Result("b", "late", 3.0)
    assert Journal(path, IDENTITY, resume=False).results("b") == []


def test_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    Journal(path, IDENTITY, resume=False)
    with pytest.raises(LoraplexError, match="torch was 2, is 3 now"):
        Journal(path, {**IDENTITY, "torch": "3"}, resume=True)
    path.write_text(json.dumps(IDENTITY) + '\n{"x": 1}\n')
    with pytest.raises(LoraplexError, match="is no journal"):
        Journal(path, IDENTITY, resume=True)


def winner(m: int, impl: str, rank: int = 16, layer: Layer = GATE_UP) -> Winner:
    configs = {"shrink": SHRINK, "expand": EXPAND}
    add = Candidate("gemm_add", configs)
    best = add if impl == "gemm_add" else Candidate("fused", {**configs, "linear": {"block_m": m}})
    batch = Batch(layer, m, min(m, 8), rank, torch.bfloat16, slots=8)
    return Winner(batch, best, 1.0, add, 2.0, 0.9, failed=0, wrong=0)


@pytest.fixture
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of tables that decides while the test runs."""
    monkeypatch.setenv("LORAPLEX_TUNING_DIR", str(tmp_path))
    _tables.cache_clear()
    choose.cache_clear()
    yield tmp_path / "sm_90.json"
    _tables.cache_clear()
    choose.cache_clear()


def chosen(m: int, op: str = "lora_linear", rank: int = 16, slots: int = 8) -> tuple[str, int]:
    """Implementation, and block_m of the linear or the expand kernel."""
    _tables.cache_clear()
    choose.cache_clear()
    choice = choose(Problem(op, m, 4096, (14336, 14336), slots, rank, "bfloat16", "sm_90"))
    if "sm_90.json" not in choice.reason or "/" not in choice.reason:
        return "shipped", 0
    main = choice.configs.get("linear") or choice.configs["expand"]
    return choice.impl, main["block_m"]


def test_table_loads_and_each_size_holds_up_to_the_next(own_tables: Path) -> None:
    winners = [winner(64, "fused"), winner(1, "fused"), winner(1024, "gemm_add")]
    write_table(own_tables, make_rules(winners), "about")
    assert [chosen(m) for m in (1, 2, 64, 65, 4096)] == [
        ("fused", 1), ("fused", 64), ("fused", 64), ("gemm_add", 16), ("gemm_add", 16),
    ]  # fmt: skip
    assert chosen(64, "add_lora") == ("shrink_expand", 16)
    # larger pools were not measured
    assert chosen(64, rank=32) == chosen(64, slots=9) == ("shipped", 0)


def test_merge_keeps_what_is_not_ours_and_what_is_not_measured_again(own_tables: Path) -> None:
    write_table(own_tables, make_rules([winner(64, "fused", rank=64)]), "first")
    write_table(own_tables, make_rules([winner(64, "fused"), winner(256, "fused")]), "second")
    write_table(own_tables, make_rules([winner(128, "fused")]), "third")
    table = json.loads(own_tables.read_text())
    assert table["about"] == "third"
    blocks = [rule["linear"]["block_m"] for rule in table["lora_linear"]]
    assert blocks == [128, 64], "rank 16 replaced as a whole and ahead of rank 64, which stays"
    assert chosen(64) == ("fused", 128)
    assert chosen(64, rank=64) == ("fused", 64)

    hand = {"impl": "fused", "shrink": SHRINK, "linear": {"block_m": 7}}
    table["lora_linear"].insert(1, hand)
    own_tables.write_text(json.dumps(table))
    write_table(own_tables, make_rules([winner(64, "fused")]), "fourth")
    assert json.loads(own_tables.read_text())["lora_linear"][0] == hand
    assert chosen(64) == ("fused", 7)


def test_table_with_an_error_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "sm_90.json"
    for text in ('{"lora_linear": [{"impl": "fused", "wen": {}}]}', "{"):
        path.write_text(text)
        with pytest.raises(LoraplexError, match=r"sm_90\.json"):
            write_table(path, make_rules([winner(64, "fused")]), "new")
        assert path.read_text() == text


def test_batch_without_a_right_candidate_has_no_rule() -> None:
    batch = Batch(GATE_UP, 64, 8, 16, torch.bfloat16)
    rules = make_rules([Winner(batch, None, None, None, None, 1.0, failed=3, wrong=1)])
    assert rules == {"lora_linear": [], "add_lora": []}


class Bar:
    def start(self, label: str) -> None:
        pass

    def advance(self) -> None:
        pass


@contextlib.contextmanager
def no_progress(total: int) -> Iterator[Bar]:
    yield Bar()


@pytest.mark.interpreter
def test_rehearsal_measures_both_ways_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(TINY, 3, 2, 8, torch.float16)
    search = Search(1, "cpu", 0, is_rehearsal=True)
    journal = Journal(None, {}, resume=False)
    (found,) = tune([batch], torch.device("cpu"), journal, search, progress=no_progress)
    assert found.best is not None
    assert (found.failed, found.wrong) == (0, 0)
    assert found.base_ms > 0
    timed = {r.candidate.removeprefix(FINAL).split()[0] for r in journal.results(batch.key)}
    assert timed == {"base", "fused", "gemm_add"}

    def measure_again(*_: object) -> None:
        raise AssertionError("everything is in the journal")

    monkeypatch.setattr(tune_module, "_measure", measure_again)
    (again,) = tune([batch], torch.device("cpu"), journal, search, progress=no_progress)
    assert again == found


@pytest.mark.interpreter
def test_what_fails_in_a_worker_is_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here workers fail, since there is no GPU that they could compile on."""
    batch = Batch(TINY, 3, 2, 8, torch.float16)
    journal = Journal(None, {}, resume=False)
    monkeypatch.setattr(tune_module, "_measure", None)
    search = Search(1, "cpu", 1, is_rehearsal=True)
    (found,) = tune([batch], torch.device("cpu"), journal, search, progress=no_progress)
    assert (found.best, found.add, found.failed, found.wrong) == (None, None, 2, 0)
    ((why, count),) = journal.reasons()
    assert count == 2
    assert why.startswith("failed: ")


@pytest.mark.interpreter
def test_wrong_candidate_has_no_time() -> None:
    batch = Batch(TINY, 3, 2, 8, torch.float16)
    sets = make_sets(batch, torch.device("cpu"))
    right = answers(batch, sets[0])["whole"]
    good = Candidate("gemm_add", {"shrink": SHRINK, "expand": EXPAND})
    (call,) = tune_module._calls(good, sets)
    result = tune_module._measure(batch, "good", [call], right, 1)
    assert result.ms is not None
    result = tune_module._measure(batch, "bad", [lambda: call() * 2], right, 1)
    assert result.ms is None
    assert result.why.startswith("wrong: WRONG: largest error")
    result = tune_module._measure(batch, "none", [lambda: 1 / 0], right, 1)
    assert result.why == "failed: ZeroDivisionError: division by zero"


def test_note_marks_measured_rules() -> None:
    (rule,) = make_rules([winner(64, "fused")])["lora_linear"]
    assert rule["note"] == f"{NOTE}: 1000.0 us at M=64, base 900.0 us"
