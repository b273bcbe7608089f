"""Adapters of an attached model that come, go and fail: two sides that never disagree."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import loraplex as lp
from loraplex.adapters import Adapter, AdapterSpec, EmbeddingLora, TokenRows
from loraplex.pool.metrics import PoolCollector

pytestmark = [
    pytest.mark.hf,
    # what PEFT says while the adapters are made
    pytest.mark.filterwarnings(
        "ignore:.*(tie_word_embeddings|save_embedding_layers|config file).*"
    ),
]

EMBEDDING = "model.embed_tokens"


def logits(model: Any, prompts: Any, name: str | None) -> torch.Tensor:
    with torch.no_grad():
        return model(**prompts, adapter_names=[name] * 7).logits


def names_of(model: Any) -> tuple[list[str], list[str], int]:
    """What both sides list, and the leases that are out."""
    pool = model._loraplex.pool
    return model.adapter_names(), pool.names(), pool.stats().leases


@pytest.fixture
def saved(cpu_llama: Any, tmp_path: Path, make_adapter: Any) -> Path:
    """An adapter with LoRA and with a head of its own."""
    config: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    return make_adapter(cpu_llama, tmp_path / "saved", 7, r=4, **config)


def test_a_name_given_again_while_it_is_removed_is_not_lost(
    llama: Any, adapters: Mapping[str, Path], saved: Path, prompts: Any, monkeypatch: Any
) -> None:
    """Between the removal and its end another thread adds the name, and a third one looks."""
    model = lp.attach(llama)
    model.add_adapter("a", saved)
    pool = model._loraplex.pool
    remove = pool.remove
    threads: list[threading.Thread] = []
    seen: list[Any] = []

    def look() -> None:
        try:
            seen.append(logits(model, prompts, "a"))
        except lp.UnknownAdapterError:
            seen.append(None)

    def remove_slowly(name: str) -> None:
        remove(name)
        threads.append(threading.Thread(target=model.add_adapter, args=("a", adapters["mlp"])))
        threads[0].start()
        while "a" not in pool:
            pass
        look()

    monkeypatch.setattr(pool, "remove", remove_slowly)
    model.remove_adapter("a")
    threads[0].join(timeout=30)
    assert names_of(model) == (["a"], ["a"], 0)
    expected = logits(model, prompts, "a")
    assert seen == [None] or torch.equal(seen[0], expected), "old parts beside new layers"
    monkeypatch.undo()
    model.remove_adapter("a")
    assert names_of(model) == ([], [], 0)


def test_a_removal_that_fails_leaves_the_adapter(
    llama: Any, adapters: Mapping[str, Path], prompts: Any, monkeypatch: Any
) -> None:
    model = lp.attach(llama)
    for name in ("attention", "mlp", "dora"):
        model.add_adapter(name, adapters[name])
    expected = logits(model, prompts, "mlp")
    with monkeypatch.context() as patch:
        patch.setattr(model._loraplex.pool, "remove", lambda name: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            model.remove_adapter("mlp")
    names = ["attention", "mlp", "dora"]
    assert names_of(model) == (names, names, 0)
    assert torch.equal(logits(model, prompts, "mlp"), expected)


def test_an_addition_that_is_interrupted_leaves_nothing(
    llama: Any, saved: Path, prompts: Any, monkeypatch: Any
) -> None:
    model = lp.attach(llama)

    class Interrupted(dict[str, Any]):
        def __setitem__(self, name: str, value: Any) -> None:
            super().__setitem__(name, value)
            raise KeyboardInterrupt

    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    for target, value in (("_make_rowwise", interrupt), ("_served", Interrupted())):
        with monkeypatch.context() as patch:
            patch.setattr(model._loraplex, target, value)
            with pytest.raises(KeyboardInterrupt):
                model.add_adapter("a", saved)
            assert names_of(model) == ([], [], 0)
    model.add_adapter("a", saved)
    assert names_of(model) == (["a"], ["a"], 0)


def test_a_warning_that_is_an_error_leaves_nothing(
    llama: Any, adapters: Mapping[str, Path]
) -> None:
    model = lp.attach(llama)
    model.add_adapter("a", adapters["mlp"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="same folder as 'a'"):
            model.add_adapter("b", adapters["mlp"])
    assert names_of(model) == (["a"], ["a"], 0)
    with pytest.warns(UserWarning, match="same folder as 'a'"):
        model.add_adapter("b", adapters["mlp"])
    model.remove_adapter("b")
    assert names_of(model) == (["a"], ["a"], 0)


def test_parts_of_an_adapter_that_is_removed_during_its_step_go_with_it(
    llama: Any, saved: Path, prompts: Any, monkeypatch: Any
) -> None:
    model = lp.attach(llama)
    model.add_adapter("a", saved)
    expected = logits(model, prompts, "a")
    residents = model._loraplex._residents
    fetch = residents.fetch

    def remove_first(wanted: Any) -> Any:
        monkeypatch.setattr(residents, "fetch", fetch)
        model.remove_adapter("a")
        return fetch(wanted)

    monkeypatch.setattr(residents, "fetch", remove_first)
    assert torch.equal(logits(model, prompts, "a"), expected)
    assert model.adapter_stats().outside_device == 0
    assert names_of(model) == ([], [], 0)


def test_what_lies_beside_the_pool_is_counted(
    llama: Any, adapters: Mapping[str, Path], saved: Path, prompts: Any
) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    model = lp.attach(llama)
    model.add_adapter("plain", adapters["mlp"])
    logits(model, prompts, "plain")
    stats = model.adapter_stats()
    assert (stats.registered, stats.resident) == (1, 1)
    assert (stats.outside_host, stats.outside_device) == (0, 0)
    model.add_adapter("saved", saved)
    head = 96 * 40 * 4
    stats = model.adapter_stats()
    assert (stats.outside_host, stats.outside_device) == (head, 0)
    logits(model, prompts, "saved")
    assert model.adapter_stats().outside_device == head
    registry = prometheus.CollectorRegistry()
    registry.register(PoolCollector(model.adapter_stats))
    assert registry.get_sample_value("loraplex_pool_outside_device") == head
    model.remove_adapter("saved")
    stats = model.adapter_stats()
    assert (stats.outside_host, stats.outside_device) == (0, 0)


def test_the_base_that_an_adapter_was_trained_on_is_listed(
    llama: Any, adapters: Mapping[str, Path]
) -> None:
    model = lp.attach(llama)
    adapter = lp.load_adapter(adapters["patterns"])
    spec = dataclasses.replace(adapter.spec, base_model="org/other")
    model.add_adapter("a", dataclasses.replace(adapter, spec=spec))
    info = model.adapter_info("a")
    assert (info.base_model, info.max_rank) == ("org/other", 8)
    with pytest.raises(lp.UnknownAdapterError):
        model.adapter_info("b")


def test_strict_is_left_by_asking_for_it(
    llama: Any, cpu_llama: Any, adapters: Mapping[str, Path], prompts: Any
) -> None:
    """L29: what matches nothing is refused, or left out with a warning that lists it."""
    model = lp.attach(llama, exclude=["down_proj"])
    with pytest.raises(lp.AdapterError, match=r"2 of 4 parts .*matched nothing.*down_proj"):
        model.add_adapter("a", adapters["patterns"])
    with pytest.warns(UserWarning, match=r"2 parts .*are ignored: .*mlp\.down_proj"):
        model.add_adapter("a", adapters["patterns"], strict=False)
    for given in (adapters["mlp"], lp.load_adapter(adapters["mlp"])):
        with pytest.raises(TypeError, match="strict must be True or False, got 'no'"):
            model.add_adapter("b", given, strict="no")
    loaded = lp.load_adapter(adapters["patterns"])
    rest = {name: part for name, part in loaded.modules.items() if "down_proj" not in name}
    model.add_adapter("rest", dataclasses.replace(loaded, modules=rest, path=""))
    assert torch.equal(logits(model, prompts, "a"), logits(model, prompts, "rest"))
    assert not torch.equal(logits(model, prompts, "a"), logits(model, prompts, None))
    name = "model.layers.0.self_attn.q_proj"
    broken = dataclasses.replace(loaded.modules[name], a=torch.ones(5, 41))
    adapter = dataclasses.replace(loaded, modules={**loaded.modules, name: broken})
    with pytest.raises(lp.AdapterError, match="lora_A has shape"):  # an error in any case
        model.add_adapter("b", adapter, strict=False)


def embedding(**changes: Any) -> EmbeddingLora:
    fields: dict[str, Any] = {"a": torch.ones(2, 96), "b": torch.ones(40, 2), "scaling": 1.0}
    return EmbeddingLora(name=EMBEDDING, **fields | changes)


NAN = float("nan")
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "head-nan": ({"saved_modules": {"lm_head.weight": torch.full((96, 40), NAN)}}, "NaN"),
    "norm-inf": ({"saved_modules": {"model.norm.weight": torch.full((40,), 1 / 1e-320)}}, "inf"),
    "embedding-nan": ({"embeddings": {EMBEDDING: embedding(a=torch.full((2, 96), NAN))}}, "NaN"),
    "embedding-scaling": ({"embeddings": {EMBEDDING: embedding(scaling=NAN)}}, "scaling that is"),
    "embedding-ranks": (
        {"embeddings": {EMBEDDING: embedding(b=torch.ones(40, 3))}}, "the ranks differ"
    ),
    "embedding-dora": (
        {"embeddings": {EMBEDDING: embedding(magnitude=torch.full((40,), NAN))}}, "DoRA scale"
    ),
    "token-nan": (
        {"token_rows": {EMBEDDING: TokenRows(EMBEDDING, (3,), torch.full((1, 40), NAN))}}, "NaN"
    ),
    "token-negative": (
        {"token_rows": {EMBEDDING: TokenRows(EMBEDDING, (-1,), torch.ones(1, 40))}}, "from 0"
    ),
    "token-count": (
        {"token_rows": {EMBEDDING: TokenRows(EMBEDDING, (1, 2), torch.ones(1, 40))}}, "one per"
    ),
    "token-beyond": (
        {"token_rows": {EMBEDDING: TokenRows(EMBEDDING, (96,), torch.ones(1, 40))}}, "97 against"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_weights_that_no_folder_could_give_are_refused_too(case: str, llama: Any) -> None:
    """An Adapter may also be built by hand; L49: nothing of it gets near other rows."""
    parts, said = BROKEN[case]
    model = lp.attach(llama)
    modules = [id(module) for module in model.modules()]
    with pytest.raises(lp.AdapterError, match=said):
        model.add_adapter("a", Adapter(AdapterSpec(r=2), {}, path="by hand", **parts))
    assert names_of(model) == ([], [], 0)
    assert [id(module) for module in model.modules()] == modules


def test_L43_expert_stacks_are_refused_by_name(tmp_path: Path, make_adapter: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    base = transformers.MixtralForCausalLM(config).eval()
    targets = ["gate_up_proj", "down_proj"]
    stacks = make_adapter(base, tmp_path / "a", r=2, target_modules=[], target_parameters=targets)
    plain = make_adapter(base, tmp_path / "b", r=2, target_modules=["q_proj"])
    model = lp.attach(base)
    with pytest.raises(
        lp.UnsupportedAdapterError, match=r"target_parameters \(model\.layers\.0\.mlp\.experts\."
    ):
        model.add_adapter("a", stacks)
    assert names_of(model) == ([], [], 0)
    model.add_adapter("b", plain)
    assert names_of(model) == (["b"], ["b"], 0)
