"""Tensor names: every spelling that PEFT and others write, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from loraplex.adapters import LayerShape, load_adapter, match
from loraplex.adapters.keys import parse_key
from loraplex.adapters.name_regex import UnsupportedPatternError
from loraplex.adapters.patterns import PatternTable
from loraplex.errors import AdapterError, UnsupportedAdapterError

pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.hf

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("raw", "module", "role", "adapter"),
    [
        (f"base_model.model.{Q}.lora_A.weight", Q, "lora_a", None),
        (f"base_model.model.{Q}.lora_B.default.weight", Q, "lora_b", "default"),
        (f"base_model.model.{Q}.lora_B.default_0.bias", Q, "lora_bias", "default_0"),
        (f"{Q}.lora_A.weight", Q, "lora_a", None),
        (f"base_model.model.base_model.model.{Q}.lora_A.lora.weight", Q, "lora_a", "lora"),
        (f"_orig_mod.base_model.model.{Q}.lora_A.weight", Q, "lora_a", None),
        (f"base_model.model._fsdp_wrapped_module.{Q}.lora_A.weight", Q, "lora_a", None),
        (f"{Q}.lora_magnitude_vector", Q, "magnitude", None),
        (f"{Q}.lora_magnitude_vector.weight", Q, "magnitude", None),
        (f"{Q}.lora_magnitude_vector.default", Q, "magnitude", "default"),
        (f"{Q}.lora_magnitude_vector.default.weight", Q, "magnitude", "default"),
        (f"{Q}.lora_magnitude_vector.default.other", Q, "unknown", "default"),
        ("m.embed_tokens.lora_embedding_A", "m.embed_tokens", "embedding_a", None),
        ("m.embed_tokens.lora_embedding_B.default", "m.embed_tokens", "embedding_b", "default"),
        ("m.embed_tokens.base_layer.weight", "m.embed_tokens", "base", None),
        ("lm_head.modules_to_save.weight", "lm_head", "saved", None),
        ("lm_head.modules_to_save.default.weight", "lm_head", "saved", "default"),
        ("lm_head.original_module.weight", "lm_head", "base", None),
        ("lm_head.weight", "lm_head", "plain", None),
        ("m.embed_tokens.token_adapter.trainable_tokens_delta", "m.embed_tokens", "token_rows",
         None),
        ("m.embed_tokens.token_adapter.base_layer.weight", "m.embed_tokens", "base", None),
        (f"{Q}.lora_diag", "", "unknown", None),
        (f"{Q}.lora_A", Q, "unknown", None),
        ("lora_A.weight", "", "unknown", None),
        ("weight", "", "unknown", None),
        ("", "", "unknown", None),
        (f"{Q}..lora_A.weight", "", "unknown", None),
        (f"{Q}\n.lora_A.weight", "", "unknown", None),
        (f"\x1b[2J{Q}.lora_A.weight", "", "unknown", None),
        (f"{'x.' * 500}lora_A.weight", "", "unknown", None),
    ],
)  # fmt: skip
def test_spellings(raw: str, module: str, role: str, adapter: str | None) -> None:
    key = parse_key(raw)
    assert (key.module, key.role, key.adapter) == (module, role, adapter)
    assert key.raw == raw


def test_nesting_is_counted_and_no_part_of_the_name() -> None:
    inner = parse_key("base_model.model.mlp.experts.base_layer.base_layer.lora_A.weight")
    assert (inner.module, inner.depth) == ("mlp.experts", 2)
    child = parse_key("base_model.model.mlp.experts.base_layer.gate.lora_A.weight")
    assert (child.module, child.depth) == ("mlp.experts.gate", 0)


@given(st.text(alphabet="abc._0", max_size=40))
def test_any_text_is_parsed(raw: str) -> None:
    assert parse_key(raw).raw == raw


# --- patterns ---------------------------------------------------------------------------------

NAMES = st.sampled_from(
    ["model.layers.0.self_attn.q_proj", "model.layers.10.mlp.up_proj", "q_proj", "my_q_proj",
     "layers.1.q_proj", "a", "x.a", "lm_head"]
)  # fmt: skip
PATTERNS = st.one_of(
    NAMES,
    st.sampled_from(
        [r"q_proj", r"^q_proj", r"layers\.1.*", r"layers.\d+.self_attn.(q|k)_proj", ".*", "",
         r"model\.layers\.[0-4]\..*", "proj", r"(?:up|down)_proj", "[", "a|b", "q_proj$"]
    ),
    st.text(alphabet="aq_proj.*^$|()\\d+[]", max_size=8),
)  # fmt: skip


def compiles(pattern: str) -> bool:
    try:
        re.compile(rf"(.*\.)?({pattern})$")
    except re.error:
        return False
    return True


@given(st.dictionaries(PATTERNS.filter(compiles), st.integers(1, 9), max_size=4), NAMES)
def test_patterns_are_those_of_peft(patterns: dict[str, int], name: str) -> None:
    from peft.utils.other import get_pattern_key

    try:
        table = PatternTable(patterns)
    except UnsupportedPatternError:  # "a*+" and the like; test_name_regex.py says which
        reject()
    expected = patterns.get(get_pattern_key(patterns.keys(), name), 77)
    assert table.find(name, 77) == expected


# --- whole files under other spellings --------------------------------------------------------


def loads_equal(trained: Any) -> None:
    """The edited file gives the tensors that peft trained."""
    adapter = load_adapter(trained.path)
    for name, module in adapter.modules.items():
        layer = trained.peft_model.base_model.model.get_submodule(name)
        assert torch.equal(module.a, layer.lora_A["default"].weight)
        assert torch.equal(module.b, layer.lora_B["default"].weight)
    assert len(adapter.modules) == 2


@pytest.mark.parametrize("infix", ["default", "default_0", "lora", "weight", "q_proj"])
def test_l32_adapter_name_in_the_keys(infix: str, tiny: Any) -> None:
    trained = tiny.train()
    trained.rename("lora_A.weight", f"lora_A.{infix}.weight")
    trained.rename("lora_B.weight", f"lora_B.{infix}.weight")
    loads_equal(trained)


@pytest.mark.parametrize("prefix", ["", "base_model.model.base_model.model.", "_orig_mod."])
def test_other_prefixes(prefix: str, tiny: Any) -> None:
    trained = tiny.train()
    trained.rename("base_model.model.", prefix)
    loads_equal(trained)


def test_l32_two_adapters_in_one_file(tiny: Any) -> None:
    trained = tiny.train()
    trained.edit_tensors(
        lambda t: {n.replace("lora_A.weight", f"lora_A.{'ab'[i % 2]}.weight"): v
                   for i, (n, v) in enumerate(t.items())}
    )  # fmt: skip
    with pytest.raises(AdapterError, match="several adapter names"):
        load_adapter(trained.path)


def test_l32_a_whole_state_dict(tiny: Any) -> None:
    """torch.save(model.state_dict()): the wrapped base weights are copies, others are refused."""
    trained = tiny.train(with_logits=False)
    (trained.path / "adapter_model.safetensors").unlink()
    torch.save(trained.peft_model.state_dict(), trained.path / "adapter_model.bin")
    with pytest.raises(AdapterError, match="neither LoRA nor listed in modules_to_save"):
        load_adapter(trained.path)
    adapter = load_adapter(trained.path, strict=False)
    assert len(adapter.modules) == 2
    assert f"{Q}.weight" in adapter.base_copies
    assert any(name.endswith("mlp.up_proj.weight") for name in adapter.ignored)


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_l14_magnitude_spellings(suffix: str, tiny: Any) -> None:
    trained = tiny.train(use_dora=True, with_logits=False)
    trained.rename("lora_magnitude_vector", f"lora_magnitude_vector{suffix}")
    adapter = load_adapter(trained.path)
    layer = trained.peft_model.base_model.model.get_submodule(Q)
    magnitude = adapter.modules[Q].magnitude
    assert magnitude is not None
    assert torch.equal(magnitude, layer.lora_magnitude_vector["default"].weight)


@pytest.mark.parametrize(
    "spelling", ["lora_magnitude_vector.magnitude", "magnitude", "lora_magnitude", "weight_m"]
)
def test_l14_unknown_magnitude_spellings_are_errors(spelling: str, tiny: Any) -> None:
    trained = tiny.train(use_dora=True, with_logits=False)
    trained.rename("lora_magnitude_vector", spelling)
    with pytest.raises(AdapterError, match=spelling.rpartition(".")[2]):
        load_adapter(trained.path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("lora_A.weight", "lora_down.weight", "kohya"),
        ("lora_A.weight", "lora_a", "MLX"),
        ("lora_A.weight", "lora.up.weight", "diffusers"),
    ],
)
def test_foreign_formats_are_named(old: str, new: str, said: str, tiny: Any) -> None:
    trained = tiny.train(with_logits=False)
    trained.rename(old, new)
    with pytest.raises(UnsupportedAdapterError, match=said):
        load_adapter(trained.path, strict=False)


def test_two_names_of_one_tensor(tiny: Any) -> None:
    trained = tiny.train(with_logits=False)
    trained.edit_tensors(
        lambda t: {**t, **{n.removeprefix("base_model.model."): v + 1 for n, v in t.items()}}
    )
    with pytest.raises(AdapterError, match="name the same tensor"):
        load_adapter(trained.path)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"modules_to_save": ["lm_head"]}, ["lm_head.weight", "lm_head.modules_to_save.weight"]),
        ({"bias": "lora_only"}, [f"{Q}.bias", f"{Q}.base_layer.bias"]),
    ],
    ids=["saved", "bias"],
)
def test_two_spellings_of_one_replacement(
    config: dict[str, Any], names: list[str], tiny: Any
) -> None:
    trained = tiny.train(with_logits=False)
    trained.edit_config(**config)
    for added in (names[:1], names[1:]):
        trained.edit_tensors(lambda t, added=added: {**t, **{n: torch.ones(32) for n in added}})
        if added == names[:1]:
            assert load_adapter(trained.path).features
    with pytest.raises(AdapterError, match="another spelling name the same tensor"):
        load_adapter(trained.path)


def test_old_peft_wrote_the_bias_without_base_layer(tiny: Any) -> None:
    trained = tiny.train("qwen2", bias="all", with_logits=False)
    expected = load_adapter(trained.path).modules[Q].bias
    trained.rename("base_layer.bias", "bias")
    found = load_adapter(trained.path).modules[Q].bias
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


@pytest.mark.parametrize("expert", ["mlp.experts.3.gate_proj", "block_sparse_moe.experts.0.w1"])
def test_l43_per_expert_keys_are_modules_of_their_own(expert: str, tiny: Any) -> None:
    trained = tiny.train(with_logits=False)
    trained.rename("self_attn.q_proj", expert)
    trained.edit_config(target_modules=[expert.rpartition(".")[2]])
    adapter = load_adapter(trained.path)
    assert list(adapter.modules) == [f"model.layers.{i}.{expert}" for i in range(2)]
    assert adapter.features == frozenset()
    layers = {name: LayerShape.plain(32, 32) for name in adapter.modules}
    assert set(match(adapter, layers)) == set(layers)
    mixtral = tiny.model("mixtral")  # this transformers keeps the experts in one stack
    with pytest.raises(AdapterError, match=rf"2 of 2 parts .* the adapter has model.*{expert}"):
        match(adapter, tiny.layers(mixtral), parameters=tiny.parameters(mixtral))
