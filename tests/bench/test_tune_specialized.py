"""What ``loraplex tune`` tries of the launch with warps of its own for the adapters."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.bench import tune as tune_module
from loraplex.bench import tune_specialized
from loraplex.bench.layers import Layer, find_model
from loraplex.bench.layers_batch import Batch
from loraplex.bench.tune import Search, launch_once
from loraplex.bench.tune_candidates import (
    Candidate,
    first_round,
    second_round,
    third_round,
)
from loraplex.bench.tune_journal import Journal, Result
from loraplex.bench.tune_table import Winner, make_rules
from loraplex.cli.tune import print_winners
from loraplex.ops.explain import Explanation
from loraplex.tuning import Choice, Problem
from loraplex.tuning.choose import check_table

SQUARE = Layer("o", 4096, (4096,))
# no strips of a shrink fit into this K, and no tile is as narrow as the second output
SHORT = Layer("short", 72, (264, 24))
LAYERS = (*(layer for name in ("llama-3-8b", "llama-3-70b-tp8", "qwen3-32b")
            for layer in find_model(name).layers), SHORT)  # fmt: skip
SHRINK = {"block_r": 16, "block_k": 128, "split_k": 4}
LINEAR = {
    "is_specialized": 1, "block_m": 64, "block_n": 64, "block_k": 128, "split_k": 2,
    "lora_steps": -4, "occupancy": 1, "num_warps": 4, "num_stages": 4, "block_r": 64,
    "lora_stages": 1,
}  # fmt: skip
BEST = Candidate("fused", {"shrink": SHRINK, "linear": LINEAR})


def offered(batch: Batch, arch: str = "sm_90", multiprocessors: int = 132) -> list[Candidate]:
    found = first_round(batch, multiprocessors, arch)
    return [candidate for candidate in found if candidate.is_specialized]


def decode_batches() -> list[Batch]:
    return [
        Batch(layer, m, min(m, slots), rank, torch.bfloat16, slots=slots)
        for layer in LAYERS
        for m in (1, 16, 17, 64)
        for slots, rank in ((8, 16), (64, 128))
    ]


@pytest.mark.parametrize("batch", decode_batches(), ids=lambda batch: batch.key)
def test_candidates_are_rules_that_fit(batch: Batch) -> None:
    opening = offered(batch)
    assert len(opening) <= tune_specialized.MOST == 12
    assert opening or batch.num_slots > 16, "of a wide layer few tiles are left for large pools"
    second = [variant for best in opening for variant in second_round(batch, best)]
    every = {candidate.key: candidate for candidate in (*opening, *second)}
    check_table("t", {"lora_linear": [{"impl": c.impl, **c.configs} for c in every.values()]})
    assert all(len(second_round(batch, best)) <= 30 for best in opening)
    for candidate in every.values():
        shrink, linear = candidate.configs["shrink"], candidate.configs["linear"]
        assert set(shrink) == set(SHRINK), "the kernel has no other settings of the shrink"
        assert set(linear) == set(LINEAR)
        assert linear["block_m"] == (16 if batch.m <= 16 else 64)
        assert linear["block_n"] % (16 * linear["num_warps"]) == 0, "16 rows for each warp"
        rows = linear["block_n"] + linear["block_m"]
        columns = linear["num_stages"] * linear["block_k"]
        columns += linear["lora_stages"] * linear["block_r"]
        assert linear["occupancy"] * (2 * rows * columns + 7 * 1024) <= 227 * 1024
        assert linear["split_k"] * linear["block_k"] <= batch.layer.k or linear["split_k"] == 1
        strips = 4 * shrink["block_k"] * shrink["split_k"]
        assert strips <= batch.layer.k or shrink["split_k"] == 1


@pytest.mark.parametrize(
    ("change", "arch"),
    [
        ({"dtype": torch.float32}, "sm_90"),
        ({"m": 65}, "sm_90"),
        ({"layer": Layer("odd", 4092, (4096,))}, "sm_90"),
        ({"rank": 20}, "sm_90"),
        ({"max_rank": 20}, "sm_90"),
        ({"max_rank": 136}, "sm_90"),
        *(({}, arch) for arch in ("sm_80", "sm_89", "sm_100", "gfx942", "cpu")),
    ],
    ids=lambda value: str(value),
)
def test_offered_only_where_the_kernel_runs(change: dict[str, Any], arch: str) -> None:
    plain: dict[str, Any] = {
        "layer": SQUARE,
        "m": 64,
        "adapters": 4,
        "rank": 16,
        "dtype": torch.float16,
    }
    assert offered(Batch(**plain))
    batch = Batch(**{**plain, **change})
    assert offered(batch, arch) == []
    assert first_round(batch, 132, arch), "the other ways are"


def test_K_is_split_into_parts_that_are_one_wave() -> None:
    def splits(layer: Layer, multiprocessors: int) -> dict[tuple[int, int], set[int]]:
        found: dict[tuple[int, int], set[int]] = {}
        for candidate in offered(Batch(layer, 16, 8, 16, torch.float16), "sm_90", multiprocessors):
            linear = candidate.configs["linear"]
            key = (linear["block_n"], linear["occupancy"])
            found.setdefault(key, set()).add(linear["split_k"])
        return found

    assert splits(SQUARE, 132)[64, 1] == {2}, "128 programs"
    assert splits(SQUARE, 132)[64, 2] == {4}, "256 programs"
    assert splits(Layer("o", 4096, (5120,)), 132)[64, 1] == {1, 2}, (
        "80 leave room, 160 have too few"
    )
    wide = splits(Layer("gate_up", 4096, (14336, 14336)), 132)
    assert (64, 1) not in wide, "448 tiles are four waves"
    assert wide[256, 1] == {1}


# bytes that the compiler says for sm_90 (Triton 3.7)
@pytest.mark.parametrize(
    ("shrink", "change", "measured"),
    [
        ({}, {"block_m": 16, "num_stages": 8, "block_r": 128}, 190_700),
        ({}, {"block_m": 16, "num_stages": 5, "block_r": 128}, 129_244),
        ({"block_r": 64}, {"block_n": 128}, 239_820),
        ({}, {"block_n": 256, "block_k": 64, "num_warps": 8}, 217_292),
    ],
)
def test_shared_memory_is_what_the_compiler_says(
    shrink: dict[str, int], change: dict[str, int], measured: int
) -> None:
    configs = ({**SHRINK, **shrink}, {**LINEAR, **change})
    assert 0 <= tune_specialized.shared_bytes(*configs) - measured <= 2048
    assert tune_specialized.fits(*configs) == (measured <= 227 * 1024)


def test_two_programs_have_half_each() -> None:
    half = {**LINEAR, "block_k": 64, "num_stages": 5}
    assert tune_specialized.fits(SHRINK, {**half, "occupancy": 2})
    assert not tune_specialized.fits(SHRINK, {**half, "occupancy": 2, "num_stages": 6})
    assert tune_specialized.fits(SHRINK, {**half, "num_stages": 6})


def test_shrinks_are_short_where_registers_are_few() -> None:
    """A loop over the shrink's K that holds more spills hundreds of bytes there."""
    batch = Batch(Layer("down", 14336, (4096,)), 64, 8, 64, torch.bfloat16)
    longest: dict[tuple[int, int], int] = {}
    for best in offered(batch):
        key = (best.configs["linear"]["num_warps"], best.configs["linear"]["occupancy"])
        for candidate in (best, *second_round(batch, best)):
            shrink = candidate.configs["shrink"]
            span = 4 * shrink["block_k"] * shrink["split_k"]
            assert 14336 % span == 0 or key == (4, 1), "masks take registers too"
            if 4 * span < 14336:
                size = shrink["block_r"] * shrink["block_k"]
                longest[key] = max(longest.get(key, 0), size)
    assert longest == {(4, 1): 2048, (8, 1): 1024, (4, 2): 512}


@pytest.mark.parametrize(("slots", "most"), [(8, 8), (64, 4)])
def test_many_adapters_come_with_few_planes_and_warps(slots: int, most: int) -> None:
    batch = Batch(SQUARE, 64, 8, 16, torch.bfloat16, slots=slots)
    found = [c for best in offered(batch) for c in second_round(batch, best)]
    assert max(candidate.configs["shrink"]["split_k"] for candidate in found) == most
    warps = {candidate.configs["linear"]["num_warps"] for candidate in found}
    assert warps == ({4, 8} if slots == 8 else {4})


def test_what_is_shipped_would_be_found() -> None:
    """Tiles and shrinks of the shipped rules are among those tried: a table of one's own must not
    be slower. A rule with others has to bring them to ``tune_specialized``."""
    tables = resources.files("loraplex.tuning").joinpath("tables")
    text = tables.joinpath("sm_90.json").read_text()
    linears = [(r["shrink"], r["linear"]) for r in json.loads(text)["lora_linear"]]
    shipped = [pair for pair in linears if pair[1].get("is_specialized")]
    assert shipped
    tile = ("block_n", "block_k", "num_warps", "num_stages", "occupancy")
    for shrink, linear in shipped:
        tried = tune_specialized.TILES[linear["block_m"]]
        assert tuple(linear[key] for key in tile) in tried, linear
        own = tuple(shrink[key] for key in ("block_r", "block_k", "split_k"))
        assert own in tune_specialized.SHRINKS, shrink


def test_shipped_rules_are_for_pools_that_they_have_columns_for() -> None:
    tables = resources.files("loraplex.tuning").joinpath("tables")
    rules = json.loads(tables.joinpath("sm_90.json").read_text())["lora_linear"]
    for rule in rules:
        if rule["linear"].get("is_specialized"):
            assert rule["when"]["max_rank"] <= rule["linear"]["block_r"], rule


def test_second_round_changes_shrink_buffers_and_parts() -> None:
    batch = Batch(SQUARE, 64, 8, 16, torch.bfloat16)
    found = second_round(batch, BEST)
    assert BEST.key not in {candidate.key for candidate in found}
    shrinks = [candidate.configs["shrink"] for candidate in found]
    linears = [candidate.configs["linear"] for candidate in found]
    assert {s["split_k"] for s in shrinks} >= {1, 2, 4, 8}
    assert {s["block_k"] for s in shrinks} == {32, 64, 128}
    assert {(c["block_r"], c["lora_stages"]) for c in linears} >= {(128, 1), (64, 2), (16, 4)}
    assert {c["split_k"] for c in linears} == {1, 2, 3}
    assert {c["lora_steps"] for c in linears if c["split_k"] == 2} == {0, -4, -8}


def test_third_round_leaves_out_what_does_not_fit_together() -> None:
    tile = {**LINEAR, "num_stages": 5, "block_r": 64}
    best = Candidate("fused", {"shrink": SHRINK, "linear": tile})
    ahead = [
        best.changed("linear", {"lora_stages": 3}),
        best.changed("linear", {"block_r": 128}),
        best.changed("shrink", {"block_k": 64}),
    ]
    assert all(tune_specialized.fits(c.configs["shrink"], c.configs["linear"]) for c in ahead)
    (together,) = third_round(best, ahead)
    assert together.configs["linear"] == {**tile, "lora_stages": 3}
    assert together.configs["shrink"] == {**SHRINK, "block_k": 64}


def test_third_round_takes_settings_that_the_best_does_not_name() -> None:
    linear = {key: value for key, value in LINEAR.items() if key != "lora_steps"}
    best = Candidate("fused", {"shrink": SHRINK, "linear": linear})
    ahead = [best.changed("linear", {"lora_steps": -8}), best.changed("linear", {"block_r": 16})]
    (together,) = third_round(best, ahead)
    assert together.configs["linear"] == {**linear, "lora_steps": -8, "block_r": 16}


def test_rounds_go_on_from_a_journal(tmp_path: Path) -> None:
    batch = Batch(SQUARE, 16, 8, 16, torch.bfloat16)
    search = Search(132, "sm_90", 0)
    path = tmp_path / "sm_90.journal.jsonl"
    journal = Journal(path, {"arch": "sm_90"}, resume=False)
    for number in (1, 2, 3):
        for candidate in search.proposals(number, batch, journal):
            shrink = candidate.configs["shrink"]
            ms = 1.0 / (1 + candidate.is_specialized + shrink["split_k"] / 99)
            ms -= candidate.configs.get("linear", {}).get("lora_steps", 0) / -9999
            journal.put(Result(batch.key, candidate.key, ms))
    again = Journal(path, {"arch": "sm_90"}, resume=True)
    for number in (1, 2, 3):
        known = search.proposals(number, batch, journal)
        assert known == search.proposals(number, batch, again)
        assert all(again.get(batch.key, candidate.key) for candidate in known)
        assert any(candidate.is_specialized for candidate in known), number


@pytest.mark.parametrize(("is_specialized", "captures"), [(True, 1), (False, 0)])
def test_a_worker_compiles_what_graphs_launch_too(
    is_specialized: bool, captures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's launch may read early: another kernel, not to be compiled while times are taken."""
    events: list[str] = []

    class Graph:
        def replay(self) -> None:
            events.append("replay")

    @contextlib.contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        events.append("capture")
        yield
        events.append("captured")

    monkeypatch.setattr(tune_module, "_latest_set", lambda batch: [])
    monkeypatch.setattr(tune_module, "_calls", lambda c, sets: [lambda: events.append("call")])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    batch = Batch(SQUARE, 16, 8, 16, torch.bfloat16)
    plain = first_round(batch, 132, "sm_90")[0]
    launch_once((batch, BEST if is_specialized else plain))
    assert events == ["call", *["capture", "call", "captured", "replay"] * captures]


def test_winner_is_a_rule_and_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    batch = Batch(SQUARE, 64, 8, 16, torch.bfloat16)
    winner = Winner(batch, BEST, 0.010, None, None, 0.009, failed=0, wrong=0)
    rules = make_rules([winner])
    check_table("t", rules)
    (rule,) = rules["lora_linear"]
    assert (rule["shrink"], rule["linear"]) == (SHRINK, LINEAR)
    assert rule["when"]["is_vectorizable"] is True
    assert rule["when"]["dtype"] == ["bfloat16"]
    print_winners([winner])
    assert "fused specialised 64x64x128 split 2" in capsys.readouterr().out


def test_explanation_names_every_setting() -> None:
    problem = Problem("lora_linear", 64, 4096, (4096,), 8, 16)
    text = str(Explanation(problem, Choice("fused", BEST.configs, "a rule")))
    assert "shrink: block_r=16 block_k=128 split_k=4\n" in text
    assert "is_specialized=1" in text
    assert "occupancy=1" in text
