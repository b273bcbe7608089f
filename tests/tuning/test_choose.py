"""The choice: a pure function, first match wins, nothing unknown passes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.errors import LoraplexError, UnsupportedImplError
from loraplex.tuning import Choice, Problem, choose

module = importlib.import_module("loraplex.tuning.choose")
PROBLEM = Problem("lora_linear", m=64, k=4096, slices=(4096, 1024), num_adapters=8, max_rank=16)
Write = Callable[[dict[str, Any]], None]


@pytest.fixture
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes the user's own table for sm_90."""
    monkeypatch.setenv("LORAPLEX_TUNING_DIR", str(tmp_path))

    def forget() -> None:
        module._tables.cache_clear()
        choose.cache_clear()

    def write(table: dict[str, Any]) -> None:
        (tmp_path / "sm_90.json").write_text(json.dumps(table))
        forget()

    forget()
    yield write
    forget()


def rule(impl: str, **when: Any) -> dict[str, Any]:
    return {"impl": impl, "when": when, "shrink": {"block_r": 16}}


@pytest.mark.parametrize(
    ("when", "holds"),
    [
        ({}, True),
        ({"dtype": ["bfloat16", "float16"]}, True),
        ({"dtype": ["float32"]}, False),
        ({"k": 4096}, True),
        ({"k": 4095}, False),
        ({"n": 5120}, True),
        ({"n": 4096}, False),
        ({"slices": [4096, 1024]}, True),
        ({"slices": [1024, 4096]}, False),
        ({"min_m": 64, "max_m": 64}, True),
        ({"min_m": 65}, False),
        ({"max_m": 63}, False),
        ({"min_k": 4096, "max_k": 4096}, True),
        ({"min_k": 4097}, False),
        ({"max_k": 4095}, False),
        ({"min_n": 5120, "max_n": 5120}, True),
        ({"min_n": 5121}, False),
        ({"max_n": 5119}, False),
        ({"max_slices": 2}, True),
        ({"max_slices": 1}, False),
        ({"max_rank": 16}, True),
        ({"max_rank": 15}, False),
        ({"max_adapters": 8}, True),
        ({"max_adapters": 7}, False),
        ({"is_vectorizable": True}, True),
        ({"is_vectorizable": False}, False),
        ({"max_m": 64, "max_rank": 15}, False),
    ],
    ids=str,
)
def test_conditions(when: dict[str, Any], holds: bool) -> None:
    assert module.matches(when, PROBLEM) is holds


@pytest.mark.parametrize(("m", "holds"), [(4, True), (5, False)])
def test_no_more_adapters_occur_than_tokens(m: int, holds: bool) -> None:
    """A step with few tokens of a large pool has the rules of a small pool."""
    step = replace(PROBLEM, m=m, num_adapters=256)
    assert module.matches({"max_adapters": 4}, step) is holds


def test_every_condition_is_tested() -> None:
    parametrize = next(m for m in test_conditions.pytestmark if m.name == "parametrize")
    tested = {key for when, _ in parametrize.args[1] for key in when}
    assert tested == set(module.CONDITIONS)


def test_first_match_wins(own_table: Write) -> None:
    own_table({"lora_linear": [rule("small", max_m=63), rule("first"), rule("second")]})
    assert choose(PROBLEM).impl == "first"
    assert choose(replace(PROBLEM, m=63)).impl == "small"
    assert choose(PROBLEM, "second").impl == "second"


def test_own_table_comes_before_the_shipped_ones(own_table: Write) -> None:
    own_table({"lora_linear": [rule("mine", max_m=64)]})
    assert choose(PROBLEM).impl == "mine"
    assert "mine" not in {choose(replace(PROBLEM, m=65)).impl, choose(PROBLEM, "fused").impl}
    assert choose(replace(PROBLEM, arch="sm_80")).impl != "mine"


def test_reason_says_which_rule_of_which_file(own_table: Write) -> None:
    own_table({"lora_linear": [rule("small", max_m=1), rule("mine")]})
    choice = choose(PROBLEM)
    assert choice == Choice("mine", {"shrink": {"block_r": 16}}, choice.reason)
    assert choice.reason.startswith("rule 1 of lora_linear in ")
    assert choice.reason.endswith("sm_90.json")
    assert choose(replace(PROBLEM, arch="cpu")).reason.endswith("in default.json")


def test_choice_is_pure(own_table: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends on the problem alone: asked again without its memory, it says the same."""
    own_table({})
    problems = [
        replace(PROBLEM, m=m, dtype=d) for m in (1, 64, 4096) for d in ("float32", "float16")
    ]
    before = [choose(problem) for problem in problems]
    monkeypatch.setattr("torch.cuda.is_available", lambda: pytest.fail("asked for a device"))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda *_: pytest.fail("asked a device")
    )
    choose.cache_clear()
    assert [choose(problem) for problem in reversed(problems)] == before[::-1]
    assert choose(problems[0]) is choose(problems[0])


def test_no_rule(own_table: Write) -> None:
    own_table({"lora_linear": [rule("mine", max_m=1), rule("mine", dtype=["float32"])]})
    with pytest.raises(UnsupportedImplError) as caught:
        choose(PROBLEM, "mine")
    assert str(caught.value).startswith(
        "impl='mine' cannot run: it needs (max_m=1) or (dtype=['float32']), got Problem(op="
    )
    with pytest.raises(LoraplexError, match="no tuning rule matches Problem"):
        choose(replace(PROBLEM, op="unheard"))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([], "sm_90.json must be an object of ops, got list"),
        ({"lora_liner": []}, "unknown op 'lora_liner', known are lora_linear"),
        ({"lora_linear": [{"when": {}}]}, "rule 0 of lora_linear in .* has no impl"),
        ({"lora_linear": [rule("a"), {"impl": "a", "kernel": {}}]}, "rule 1 .* key 'kernel'"),
        ({"lora_linear": [rule("a", max_n_tokens=1)]}, "rule 0 .*, when has .* 'max_n_tokens'"),
        (
            {"lora_linear": [{"impl": "a", "shrink": {"block_x": 1}}]},
            "rule 0 .*, shrink has unknown key 'block_x'",
        ),
    ],
    ids=["list", "op", "no_impl", "kernel", "condition", "config"],
)
def test_unknown_keys_are_errors(table: Any, words: str, own_table: Write) -> None:
    own_table(table)
    with pytest.raises(LoraplexError, match=words):
        choose(PROBLEM)


def test_a_specialised_launch_needs_two_stages(own_table: Write) -> None:
    linear = {"is_specialized": 1, "num_warps": 4, "occupancy": 1, "block_r": 64}
    for stages in ({"num_stages": 1}, {}):
        own_table({"lora_linear": [{"impl": "a", "linear": {**linear, **stages}}]})
        with pytest.raises(LoraplexError, match="rule 0 .*: num_stages .* at least 2, got"):
            choose(PROBLEM)
    own_table({"lora_linear": [{"impl": "a", "linear": {**linear, "num_stages": 2}}]})
    assert choose(PROBLEM).impl == "a"


@pytest.mark.parametrize("block_r", [8, 48, 512])
def test_columns_of_a_specialised_launch(block_r: int, own_table: Write) -> None:
    linear = {
        "is_specialized": 1, "num_warps": 4, "occupancy": 1, "num_stages": 2, "block_r": block_r,
    }  # fmt: skip
    own_table({"lora_linear": [{"impl": "a", "linear": linear}]})
    with pytest.raises(LoraplexError, match=f"power of two from 16 to 256, got {block_r}"):
        choose(PROBLEM)


def test_n_is_the_sum_of_the_slices() -> None:
    assert PROBLEM.n == 5120
