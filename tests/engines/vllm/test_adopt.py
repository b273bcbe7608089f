"""What changes over, what stays on vLLM's own path, and what vLLM's own path is told."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraplex.engines.vllm import adopt as adoption
from loraplex.engines.vllm.adopt import make_plan, why_not
from loraplex.engines.vllm.layers import added, fused, watched
from loraplex.engines.vllm.op import AdoptedLayer
from loraplex.engines.vllm.plugin import hand_over, install
from loraplex.errors import LoraplexError
from loraplex.version import __version__

BF16 = torch.bfloat16


@dataclass
class Mapping:
    """``LoRAMapping``."""

    index_mapping: tuple[int, ...]
    prompt_mapping: tuple[int, ...]
    is_prefill: bool = True


class VocabParallelEmbeddingWithLoRA(torch.nn.Module):
    """Named like vLLM's: a layer that keeps vLLM's own path."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[int, Any] = {}

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        self.reset_lora(index)
        self.loaded[index] = lora_a

    def reset_lora(self, index: int) -> None:
        self.loaded.pop(index, None)


class FusedMoEWithLoRA(torch.nn.Module):
    """A layer that the plugin does not know."""


def make_manager(vllm: SimpleNamespace, *, moe: bool = False, slots: int = 3) -> Any:
    bases = vllm.bases

    def layer(kind: str, base: Any) -> Any:
        return vllm.make_layer("fake", kind, base, slots, 16)

    quantised = bases.ColumnParallelLinear(64, (48,), dtype=BF16, method=bases.Fp8LinearMethod)
    modules: dict[str, Any] = {
        "qkv": layer("MergedQKVParallelLinearWithLoRA",
                     bases.QKVParallelLinear(64, (64, 32, 32), dtype=BF16)),
        "fp8": layer("ColumnParallelLinearWithLoRA", quantised),
        "embed": VocabParallelEmbeddingWithLoRA(),
        "head": VocabParallelEmbeddingWithLoRA(),
    }  # fmt: skip
    if moe:
        modules["experts"] = FusedMoEWithLoRA()
    return vllm.Manager(modules, slots, BF16)


def step(manager: Any, ids: list[int], slot_ids: list[int | None]) -> None:
    manager.wrapper.update_metadata(
        Mapping(tuple(ids), tuple(ids)), slot_ids, manager.lora_slots + 1, 100
    )


def test_each_layer_is_decided_by_itself(vllm: SimpleNamespace) -> None:
    bases, manager = vllm.bases, make_manager(vllm, moe=True)
    make = vllm.make_layer
    row = bases.RowParallelLinear(64, (48,), dtype=BF16)
    manager.modules |= {
        "gate": make("fake", "ReplicatedLinearWithLoRA",
                     bases.GateLinear(64, (8,), dtype=BF16), 3, 16),
        "fp32": make("fake", "RowParallelLinearWithLoRA",
                     bases.RowParallelLinear(64, (48,)), 3, 16),
        "sharded": type("RowParallelLinearWithShardedLoRA",
                        (type(make("fake", "RowParallelLinearWithLoRA", row, 3, 16)),), {})(row),
    }  # fmt: skip
    plan = make_plan(manager)
    assert plan.makers == {"qkv": fused, "fp8": added, "embed": watched, "head": watched}
    assert plan.own == ["experts", "gate", "fp32", "sharded"]


def test_classes_change_in_place(vllm: SimpleNamespace) -> None:
    manager = make_manager(vllm)
    before = {name: type(module) for name, module in manager.modules.items()}
    config = vllm.adopted(manager)
    for name, module in manager.modules.items():
        assert isinstance(module, before[name])
        assert type(module) is not before[name]
        assert type(module).__name__ == before[name].__name__
        assert "set_lora" in dir(before[name])
    assert config.additional_config == {"loraplex": __version__}
    names = {name for name, _ in manager.modules["qkv"].named_buffers()}
    assert {"_loraplex_entries", "_loraplex_indices_16", "_loraplex_plan_128"} <= names
    assert not manager.modules["qkv"].state_dict().keys() & names


def test_stacked_tensors_are_used_where_they_are(vllm: SimpleNamespace) -> None:
    manager = make_manager(vllm)
    vllm.adopted(manager)
    layer = manager.modules["qkv"]
    a, b = torch.randn(5, 64).to(BF16), torch.randn(64, 5).to(BF16)
    layer.set_lora(1, [a, None, None], [b, None, None])
    entry = layer._loraplex.slots.table.entries[1]
    assert entry[0, 0] == layer.lora_a_stacked[0][1].data_ptr()
    assert entry[0, 2] == layer.lora_b_stacked[0][1].data_ptr()
    # whole vectors: five ranks and three that vLLM has cleared
    assert entry[:, 4].tolist() == [8, 0, 0]
    layer.reset_lora(1)
    assert (entry == 0).all()


def test_an_error_leaves_everything_as_it_was(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(vllm)
    before = [type(module) for module in (*manager.modules.values(), manager.wrapper)]

    def fail(own: type) -> type:
        raise RuntimeError("no class today")

    monkeypatch.setattr(adoption, "routed", fail)
    config = vllm.config_of(BF16)

    def adopt(manager: Any, config: Any) -> Any:
        adoption.adopt(manager, config, make_plan(manager))

    hand_over(manager, config, logging.getLogger("vllm"), adopt)
    assert before == [type(module) for module in (*manager.modules.values(), manager.wrapper)]
    assert config.additional_config == {}
    assert "loraplex is off after an error" in caplog.text


def test_rehearsal_runs_every_kind_of_layer_once(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(vllm)
    runs: list[tuple[bool, int]] = []

    class Spy(AdoptedLayer):
        def linear(self, x: Any, weight: Any, bias: Any) -> Any:
            runs.append((self.step.has_lora, x.shape[0]))
            return super().linear(x, weight, bias)

        def add_(self, y: Any, x: Any) -> None:
            runs.append((self.step.has_lora, x.shape[0]))
            super().add_(y, x)

    monkeypatch.setattr(adoption, "AdoptedLayer", Spy)
    plan = make_plan(manager)
    adoption.adopt(manager, vllm.config_of(BF16), plan, is_rehearsed=True)
    # every height of tiles, and what 256 tokens can have at most
    assert sorted(runs) == sorted([(True, rows) for rows in (16, 32, 64, 256)] * 2)
    step = manager.wrapper._loraplex_step
    assert not step.has_lora
    assert (step.route(256).indices == -1).all()


def test_rehearsal_finds_a_wrong_layer(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(vllm)

    class Wrong(AdoptedLayer):
        def linear(self, x: Any, weight: Any, bias: Any) -> Any:
            return 1.1 * super().linear(x, weight, bias)

    monkeypatch.setattr(adoption, "AdoptedLayer", Wrong)
    with pytest.raises(LoraplexError, match="qkv without adapters must be its base layer"):
        adoption.adopt(manager, vllm.config_of(BF16), make_plan(manager), is_rehearsed=True)
    assert "loraplex" not in type(manager.modules["qkv"]).__module__


def test_own_path_hears_nothing_of_adapters_without_weights_there(vllm: SimpleNamespace) -> None:
    manager = make_manager(vllm)
    vllm.adopted(manager)
    wrapper = manager.wrapper
    step(manager, [5, 5, 0, 9], [9, None, 5])
    assert wrapper.own_calls == []
    assert wrapper.indices_len == [4, 4, 4, 4]
    for meta in (wrapper.token_mapping_meta, wrapper.prompt_mapping_meta):
        assert bool(meta.no_lora_flag_cpu)
    assert (wrapper._token_lora_indices == -1).all()
    assert (wrapper._embeddings_indices == 0).all()
    assert wrapper._loraplex_step.route(4).indices.tolist() == [2, 2, -1, 0]


def test_own_path_hears_of_the_adapters_with_weights_there(vllm: SimpleNamespace) -> None:
    manager = make_manager(vllm)
    vllm.adopted(manager)
    wrapper = manager.wrapper
    step(manager, [5, 9], [9, None, 5])
    manager.modules["head"].set_lora(2, "a", "b")
    step(manager, [5, 0, 9], [9, None, 5])
    assert wrapper.token_mapping_meta.told == [5, 0, 0]
    # and when it has gone again, vLLM's metadata is made anew for base rows
    manager.modules["head"].reset_lora(2)
    step(manager, [5, 0, 9], [9, None, 5])
    assert wrapper.token_mapping_meta.told is None
    assert bool(wrapper.token_mapping_meta.no_lora_flag_cpu)
    assert len(wrapper.own_calls) == 1


def test_weights_that_come_or_go_make_the_next_step_new(vllm: SimpleNamespace) -> None:
    """The manager skips a step that it has seen; the own path's rows differ all the same."""
    manager = make_manager(vllm)
    vllm.adopted(manager)
    head = manager.modules["head"]
    for change in (lambda: head.set_lora(0, "a", "b"), lambda: head.reset_lora(0)):
        manager._last_mapping = "seen"
        change()
        assert manager._last_mapping is None
    manager._last_mapping = "seen"
    head.reset_lora(0)
    assert manager._last_mapping == "seen"


def test_unknown_layers_get_the_whole_mapping(vllm: SimpleNamespace) -> None:
    manager = make_manager(vllm, moe=True)
    vllm.adopted(manager)
    step(manager, [5, 0, 9], [9, None, 5])
    assert manager.wrapper.token_mapping_meta.told == [5, 0, 9]
    assert manager.wrapper._loraplex_step.route(3).indices.tolist() == [2, -1, 0]


def test_two_engines_in_one_process(vllm: SimpleNamespace) -> None:
    """Layers are told apart by their handle, whatever their names."""
    one, two = make_manager(vllm), make_manager(vllm)
    for manager in (one, two):
        vllm.adopted(manager)
    x = torch.randn(2, 64).to(BF16)
    for manager in (one, two):
        layer = manager.modules["qkv"]
        assert torch.equal(layer(x)[0], layer.base_layer(x)[0])
    assert one.modules["qkv"]._loraplex_handle != two.modules["qkv"]._loraplex_handle


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m, c: None, "the device is cpu, not an NVIDIA GPU"),
        (lambda m, c: setattr(c.model_config, "dtype", torch.float32),
         "the model's dtype is torch.float32, not bfloat16 or float16"),
        (lambda m, c: setattr(m.lora_config, "lora_dtype", torch.float16),
         "lora_dtype is torch.float16, the model's is torch.bfloat16"),
        (lambda m, c: m.punica_wrapper_mapping.update(tower=SimpleNamespace()),
         "the LoRA backend here is SimpleNamespace, not PunicaWrapperGPU"),
        (lambda m, c: setattr(c, "additional_config", SimpleNamespace()),
         "additional_config is not a dict"),
    ],
)  # fmt: skip
def test_reasons_to_stay(vllm: SimpleNamespace, change: Any, reason: str) -> None:
    manager, config = make_manager(vllm), vllm.config_of(BF16)
    change(manager, config)
    assert why_not(manager, config, is_batch_invariant=False) == reason


def test_batch_invariance_stays(vllm: SimpleNamespace) -> None:
    found = why_not(make_manager(vllm), vllm.config_of(BF16), is_batch_invariant=True)
    assert found == "VLLM_BATCH_INVARIANT is set"


def test_install_twice_adopts_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Any] = []

    class LoRAModelManager:
        def __init__(self, model: Any, vllm_config: Any) -> None:
            self.model = model

    class LRUCacheLoRAModelManager(LoRAModelManager):
        pass

    def adopt_all(manager: Any, config: Any) -> Any:
        calls.append((manager.model, config))
        return "it does not fit"

    monkeypatch.setattr("loraplex.engines.vllm.plugin.adopt_all", adopt_all)
    logger = logging.getLogger("vllm")
    for _ in range(3):
        install(LoRAModelManager, logger)
    LRUCacheLoRAModelManager("model", vllm_config="config")
    assert calls == [("model", "config")]
    assert "loraplex is off: it does not fit. LoRA runs on vLLM's own kernels." in caplog.text
