"""The benchmark of the pool runs anywhere; only on a GPU do its numbers mean something."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

import loraplex as lp
from loraplex import LoraplexError, UnknownAdapterError
from loraplex.bench import pool as bench
from loraplex.bench.pool_decode import Decode


def test_quick_mode_measures_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results" / "pool.json"
    assert bench.main(["--quick", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    content = json.loads(path.read_text())
    assert content["mode"] == "quick"
    assert "mode quick" in printed
    assert ("No GPU" in printed) == (not torch.cuda.is_available())
    names = [figure["name"] for figure in content["figures"]]
    assert len(names) == len(set(names)) >= 12
    for words in ("plain copy", "device-ready", "64 of 20", "64 of 100", "rank 8", "loading"):
        assert any(words in name for name in names), words
    for figure in content["figures"]:
        assert figure["value"] > 0
        assert figure["most"] is None
        assert figure["name"] in printed


def test_a_missed_limit_shows() -> None:
    missed = bench.Figure("ratio", 1.4, "x", 1.3)
    assert not missed.is_met
    assert "<= 1.3   MISSED" in bench.as_row(missed)
    assert "met" in bench.as_row(bench.Figure("ratio", 1.2, "x", 1.3))
    assert bench.Figure("time", 5.0, "ms").is_met


def test_wrong_weights_refuse_the_numbers(device: torch.device) -> None:
    shapes = bench.QUICK.shapes()
    adapter = bench.make_adapter(shapes, 8, torch.float32)
    with lp.AdapterPool(
        shapes, max_adapters=1, dtype=torch.float32, device=device, max_rank=8
    ) as pool:
        pool.add("a", adapter)
        bench._check_weights(pool, "a", adapter)
        pool.table(next(iter(shapes))).storages[0].fill_(0)
        with pytest.raises(LoraplexError, match="weights are wrong"):
            bench._check_weights(pool, "a", adapter)


def test_steps_are_timed_beside_the_loads_they_say(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = bench.QUICK.shapes()
    adapter = bench.make_adapter(shapes, 8, torch.float32)
    names = ["resident", *"abcd"]
    with lp.AdapterPool(
        shapes, max_adapters=3, dtype=torch.float32, device=device, max_rank=8
    ) as pool:
        for name in names:
            pool.add(name, adapter)
        pool.pin("resident")
        decode = Decode(pool, names[:1], rows=4)
        loads = pool.stats().loads
        rate, arriving = decode.sample(3)
        assert rate > 0
        assert arriving == pool.stats().loads - loads == 0
        decode.sample_with_prefetch(9, names[1:], 4)
        assert pool.stats().loads - loads == 3, "before steps 0, 4 and 8"
        loads, deadline, step = pool.stats().loads, time.monotonic() + 30, decode.step

        def step_until_loaded() -> None:
            """However fast steps are, and slow the copies: three loads begin before the last."""
            step()
            while pool.stats().loads - loads < 3 and time.monotonic() < deadline:
                time.sleep(1e-3)

        monkeypatch.setattr(decode, "step", step_until_loaded)
        rate, arriving = decode.sample_back_to_back(20, names[1:])
        assert rate > 0
        assert arriving > 0
        assert pool.stats().loads - loads > 2
        with pytest.raises(UnknownAdapterError):
            decode.sample_back_to_back(2, ["nobody"])
        assert pool.info("resident").is_pinned


def test_the_model_is_llama_3_8b() -> None:
    shapes = bench.LLAMA_8B.shapes()
    num_bytes = (
        2 * 16 * sum(s.in_features * len(s.slices) + s.out_features for s in shapes.values())
    )
    assert num_bytes == 83_886_080  # the 84 MB of a rank-16 adapter
