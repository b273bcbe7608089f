"""Layers of models, and batches on them with their right answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import loraplex as lp
from loraplex.bench.layers import CONFIGS, TINY, Layer, find_model
from loraplex.bench.layers_batch import Batch, answers, make_sets, parts_of, serial, time_checked

LAYER = Layer("qkv", 64, (48, 16, 16))
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "qkv", "o", "gate_up", "down", "blocks"),
    [
        ("llama-3-8b", (4096, (4096, 1024, 1024)), (4096, (4096,)),
         (4096, (14336, 14336)), (14336, (4096,)), 32),
        ("llama-3-70b-tp8", (8192, (1024, 128, 128)), (1024, (8192,)),
         (8192, (3584, 3584)), (3584, (8192,)), 80),
        ("qwen3-32b", (5120, (8192, 1024, 1024)), (8192, (5120,)),
         (5120, (25600, 25600)), (25600, (5120,)), 64),
    ],
)  # fmt: skip
def test_known_models(
    name: str, qkv: object, o: object, gate_up: object, down: object, blocks: int
) -> None:
    model = find_model(name)
    assert [(layer.k, layer.slices) for layer in model.layers] == [qkv, o, gate_up, down]
    assert model.blocks == blocks


def test_config_file_or_folder(tmp_path: Path) -> None:
    config = dict(CONFIGS["llama-3-8b"][0])
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "num_key_value_heads": None}))
    assert find_model(str(path)).layers[0].slices == (4096, 4096, 4096)
    path.write_text(json.dumps({"text_config": config}))
    assert find_model(str(tmp_path)).layers == find_model("llama-3-8b").layers
    # with more shards than key-value heads, each shard has one
    assert find_model(str(tmp_path), tp=16).layers[0].slices == (256, 128, 128)


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({"hidden_size": 0}, 1, "hidden_size must be a positive whole number, got 0"),
        ({"intermediate_size": None}, 1, "intermediate_size must be .* got None"),
        ({"num_local_experts": 8}, 1, "mixture of experts"),
        ({}, 3, r"tp=3 does not divide num_attention_heads \(32\)"),
    ],
)
def test_bad_config(change: dict[str, object], tp: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGS["llama-3-8b"][0], **change}))
    with pytest.raises(ValueError, match=message):
        find_model(str(path), tp)


@pytest.mark.parametrize("text", ["[]", "{"])
def test_file_that_is_no_config(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        find_model(str(path))


def test_unknown_model() -> None:
    with pytest.raises(ValueError, match="llama-3-8b, .* got 'gpt-2'"):
        find_model("gpt-2")


def test_serial_is_the_definition() -> None:
    batch = Batch(LAYER, 5, 2, 4, torch.float64, slots=6, max_rank=8)
    (tensors,) = make_sets(batch, CPU)
    y = serial(batch, tensors)
    for row, slot in enumerate(batch.indices().tolist()):
        expected = F.linear(tensors.x[row], tensors.weight)
        for columns, a, b in parts_of(batch, tensors, slot):
            assert a.shape[0] == b.shape[1] == 4
            expected[columns] += 0.5 * b @ (a @ tensors.x[row])
        torch.testing.assert_close(y[row], expected)
    torch.testing.assert_close(
        y, lp.lora_linear(tensors.x, tensors.weight, tensors.table, tensors.routing)
    )


@pytest.mark.parametrize(("m", "adapters", "slots"), [(1, 1, 8), (64, 8, 8), (600, 8, 64)])
def test_as_many_adapters_occur_as_said(m: int, adapters: int, slots: int) -> None:
    indices = Batch(LAYER, m, adapters, 4, torch.float16, slots=slots).indices()
    assert indices.shape == (m,)
    assert len(set(indices.tolist())) == adapters
    assert int(indices.max()) < slots
    is_in_runs = bool((indices.diff() >= 0).all())
    assert is_in_runs == (m >= 512 or adapters == 1)


def test_mixed_ranks_are_counted_by_who_occurs() -> None:
    batch = Batch(LAYER, 4, 2, 16, torch.float16, is_mixed=True)
    assert batch.ranks == [8, 16]
    base, whole = batch.work()["base"], batch.work()["whole"]
    assert base == (2 * (64 * 80 + 4 * (64 + 80)), 2 * 4 * 64 * 80)
    width = 3 * 64 + 80
    assert whole[0] - base[0] == 2 * (8 + 16) * width
    assert whole[1] - base[1] == 2 * 2 * (8 + 16) * width


def test_keys_tell_batches_apart() -> None:
    batches = [
        Batch(layer, m, 1, r, dtype, is_mixed=mixed, slots=slots, max_rank=capacity)
        for layer in TINY.layers
        for m in (1, 2)
        for r in (8, 16)
        for dtype in (torch.float16, torch.bfloat16)
        for mixed in (False, True)
        for slots in (1, 2)
        for capacity in (16, 32)
    ]
    assert len({batch.key for batch in batches}) == len(batches)


def test_wrong_result_gets_no_time() -> None:
    batch = Batch(LAYER, 4, 2, 8, torch.float16)
    (tensors,) = make_sets(batch, CPU)
    right = answers(batch, tensors)["whole"]
    timing, verdict = time_checked(
        [lambda: serial(batch, tensors)], right, warmup=0, repeat=2
    )  # fmt: skip
    assert timing is not None
    assert verdict.is_correct
    timing, verdict = time_checked(
        [lambda: F.linear(tensors.x, tensors.weight)], right, warmup=0, repeat=2
    )  # fmt: skip
    assert timing is None
    assert not verdict.is_correct


def test_result_that_goes_wrong_while_timed_gets_no_time() -> None:
    batch = Batch(LAYER, 4, 2, 8, torch.float16)
    (tensors,) = make_sets(batch, CPU)
    right = answers(batch, tensors)["whole"]
    kept: list[torch.Tensor] = []

    def call() -> torch.Tensor:
        kept.append(serial(batch, tensors) + (1.0 if len(kept) > 2 else 0.0))
        return kept[-1]

    timing, verdict = time_checked([call], right, warmup=0, repeat=2)
    assert timing is None
    assert not verdict.is_correct


@pytest.mark.parametrize("name", ["m", "adapters", "rank"])
def test_sizes_are_at_least_one(name: str) -> None:
    sizes = {"m": 1, "adapters": 1, "rank": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Batch(LAYER, dtype=torch.float16, **sizes)
