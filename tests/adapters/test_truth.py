"""Every variant against peft's own logits, in float64: same numbers or a named refusal."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from packaging.version import Version

from loraplex.adapters import load_adapter, match
from loraplex.errors import UnsupportedAdapterError

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.hf

# tools/peft_matrix.sh runs these tests with the oldest supported peft and those in between.
PEFT = Version(peft.__version__)

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GPT2 = ["c_attn", "c_proj", "c_fc"]


@dataclass(frozen=True)
class Variant:
    """One way to configure peft; `features` is what the adapter must say that it needs."""

    name: str
    config: dict[str, Any]
    model: str = "llama"
    features: set[str] = field(default_factory=set)
    since: str = "0.18"  # the first peft that can build it


def variant(
    name: str, model: str = "llama", features: str = "", since: str = "0.18", **config: Any
) -> Variant:
    found = set(features.split())
    if config.get("bias") == "lora_only" and Version("0.21") > PEFT:
        found.remove("bias")  # peft forgot to save it
    return Variant(name, config, model, found, since)


VARIANTS = [
    variant("plain", target_modules=ALL),
    variant("L01-rslora-r16", use_rslora=True, r=16, lora_alpha=16),
    variant("L01-rslora-r64", use_rslora=True, r=64, lora_alpha=16),
    variant("L03-rank-pattern", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"],
            rank_pattern={"q_proj": 4}),
    variant("L04-rslora-patterns", r=8, lora_alpha=16, use_rslora=True,
            target_modules=["q_proj", "v_proj"], rank_pattern={"q_proj": 64},
            alpha_pattern={"q_proj": 32}),
    variant("patterns-regex-first-match-wins", r=8, target_modules=ALL,
            rank_pattern={r"^model\.layers\.1\.mlp.*": 2, r"layers.\d+.mlp.*": 5, "up_proj": 3},
            alpha_pattern={"mlp.up_proj": 7, "proj": 11, "up_proj": 13, ".*_proj": 17}),
    variant("fractional-alpha", lora_alpha=0.3, target_modules=ALL),
    variant("L07-layers-to-transform", target_modules=["q_proj"], layers_to_transform=[0],
            layers_pattern="layers"),
    variant("L07-bare-base", "llama-bare", since="0.21", target_modules=["q_proj"],
            layers_to_transform=[0], layers_pattern="layers"),
    variant("L08-regex-targets", target_modules=r".*layers\.[02]\.self_attn\.(q|v)_proj"),
    variant("all-linear", target_modules="all-linear"),
    variant("exclude-modules", target_modules=ALL, exclude_modules=["layers.0.self_attn.q_proj"]),
    variant("L14-dora", features="dora", use_dora=True, target_modules=ALL),
    variant("dora-rslora", features="dora", use_dora=True, use_rslora=True, target_modules=ALL),
    variant("dora-with-biases", "qwen2", "dora", use_dora=True, target_modules=ALL),
    variant("L15-lora-bias", features="lora_bias", lora_bias=True,
            target_modules=["q_proj", "o_proj"]),
    variant("bias-all", "qwen2", "bias", bias="all", target_modules=["q_proj", "o_proj"]),
    variant("bias-lora-only", "qwen2", "bias", bias="lora_only", target_modules=["q_proj"]),
    variant("bias-all-dora", "qwen2", "bias dora", bias="all", use_dora=True,
            target_modules=["q_proj"]),
    variant("L17-modules-to-save-head", features="modules_to_save", modules_to_save=["lm_head"]),
    variant("modules-to-save-norms", features="modules_to_save", modules_to_save=["norm"]),
    variant("modules-to-save-embeddings", features="modules_to_save",
            modules_to_save=["embed_tokens"]),
    variant("modules-to-save-with-children", features="modules_to_save", modules_to_save=["mlp"]),
    variant("modules-to-save-tied-head", "llama-tied", "modules_to_save",
            modules_to_save=["lm_head"]),
    variant("L18-head-and-embeddings", features="embeddings",
            target_modules=["q_proj", "embed_tokens", "lm_head"]),
    variant("L18-head-and-embeddings-tied", "llama-tied", "embeddings",
            target_modules=["q_proj", "embed_tokens", "lm_head"]),
    variant("L19-embeddings-only", features="embeddings", target_modules=["embed_tokens"]),
    variant("embeddings-dora", features="embeddings dora", use_dora=True,
            target_modules=["embed_tokens", "q_proj"]),
    variant("L22-tied-head-only", "llama-tied", target_modules=["lm_head"]),
    variant("ensure-weight-tying", "llama-tied", "embeddings", ensure_weight_tying=True,
            target_modules=["embed_tokens", "q_proj"]),
    variant("trainable-tokens", features="trainable_tokens", trainable_token_indices=[7, 3, 60]),
    variant("trainable-tokens-tied", "llama-tied", "trainable_tokens",
            trainable_token_indices={"embed_tokens": [7, 3]}),
    variant("L34-L35-widths-not-from-hidden", "llama-odd", target_modules=ALL),
    variant("gpt2-conv1d", "gpt2", fan_in_fan_out=True, target_modules=GPT2),
    variant("gpt2-dora-bias", "gpt2", "dora bias", fan_in_fan_out=True, target_modules=GPT2,
            use_dora=True, bias="lora_only"),
    variant("gpt2-bias-all", "gpt2", "bias", fan_in_fan_out=True, target_modules=["c_attn"],
            bias="all"),
    variant("phi3-fused", "phi3", target_modules=["qkv_proj", "gate_up_proj"]),
    variant("target-parameter-of-a-linear", target_modules=["q_proj"],
            target_parameters=["v_proj.weight"], rank_pattern={"v_proj.weight": 2}),
    variant("L48-rank-above-both-sizes", target_modules=["q_proj", "k_proj"], r=48),
    variant("init-gaussian", init_lora_weights="gaussian"),
    variant("init-orthogonal", init_lora_weights="orthogonal"),
]  # fmt: skip


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: case.name)
def test_logits_equal_peft(case: Variant, tiny: Any) -> None:
    if Version(case.since) > PEFT:
        pytest.skip(f"peft {PEFT} cannot build it")
    trained = tiny.train(case.model, **case.config)
    adapter = load_adapter(trained.path)
    assert adapter.features == case.features
    base = trained.base
    matching = match(adapter, tiny.layers(base), parameters=tiny.parameters(base))
    assert matching.renaming is None
    served = tiny.serve(base, matching)
    # Both in float64: only the order of a few sums differs.
    torch.testing.assert_close(served, trained.logits, rtol=1e-9, atol=1e-9)
    assert (served - tiny.output(base)).abs().max() > 1e-3, "the adapter changes something"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({"use_rslora": True, "r": 16, "lora_alpha": 16}, (4.0, 4.0), id="L01-r16"),
        pytest.param({"use_rslora": True, "r": 64, "lora_alpha": 64}, (8.0, 8.0), id="L01-r64"),
        pytest.param(
            {"r": 8, "lora_alpha": 16, "rank_pattern": {"q_proj": 4}}, (4.0, 2.0), id="L03"
        ),
        pytest.param(
            {"r": 8, "lora_alpha": 16, "use_rslora": True, "rank_pattern": {"q_proj": 64},
             "alpha_pattern": {"q_proj": 32}},
            (4.0, 16 / 8**0.5),
            id="L04",
        ),
    ],
)  # fmt: skip
def test_scales_are_those_of_the_table(
    config: dict[str, Any], expected: tuple[float, float], tiny: Any
) -> None:
    trained = tiny.train(target_modules=["q_proj", "v_proj"], **config)
    adapter = load_adapter(trained.path)
    found = [
        adapter.modules[f"model.layers.1.self_attn.{name}"].scaling for name in ("q_proj", "v_proj")
    ]
    assert found == pytest.approx(expected, rel=1e-12)
    for name, module in adapter.modules.items():
        layer = trained.peft_model.base_model.model.get_submodule(name)
        assert module.scaling == layer.scaling["default"]
        assert module.rank == layer.r["default"]
        delta = module.scaling * module.b @ module.a
        torch.testing.assert_close(delta, layer.get_delta_weight("default"), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            {"target_parameters": ["gate_up_proj", "down_proj"], "target_modules": ["q_proj"]},
            id="L43-both",
        ),
        pytest.param(
            {"target_parameters": ["mlp.experts.down_proj"], "target_modules": [],
             "rank_pattern": {"experts.down_proj": 3}},
            id="L43-one-by-path",
        ),
        pytest.param(
            {"target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"],
             "rank_pattern": {"experts.down_proj": 3}, "use_rslora": True,
             "alpha_pattern": {"gate_up_proj": 5}},
            id="L43-patterns",
        ),
    ],
)  # fmt: skip
def test_expert_stacks_equal_peft(config: dict[str, Any], tiny: Any) -> None:
    trained = tiny.train("mixtral", with_logits=False, **{"r": 2, "target_modules": [], **config})
    adapter = load_adapter(trained.path)
    assert "target_parameters" in adapter.features
    base = trained.base
    matching = match(adapter, tiny.layers(base), parameters=tiny.parameters(base))
    wrappers = {
        f"{name.replace('.base_layer', '')}.{layer.parameter_name}": layer
        for name, layer in trained.peft_model.base_model.model.named_modules()
        if type(layer).__name__ == "ParamWrapper"
    }
    assert wrappers.keys() == matching.parameters.keys()
    assert len(wrappers) in (2, 4)
    for name, wrapper in wrappers.items():
        stack = matching.parameters[name]
        experts = [stack.expert(e) for e in range(4)]
        delta = torch.stack([stack.scaling * b @ a for a, b in experts])
        if Version("0.19.1") > PEFT:  # takes every stack for [experts, in, out]
            delta = delta.transpose(1, 2)
        torch.testing.assert_close(delta, wrapper.get_delta_weight("default"))


def test_mica_is_plain_lora(tiny: Any) -> None:
    if Version("0.20") > PEFT:
        pytest.skip(f"peft {PEFT} has no MiCA")
    trained = tiny.train("llama-fp32", init_lora_weights="mica", with_logits=False)
    for name, module in load_adapter(trained.path).modules.items():
        expected = trained.peft_model.base_model.model.get_submodule(name)
        delta = module.b @ module.a * module.scaling
        assert torch.equal(delta, expected.get_delta_weight("default"))


def test_velora_changes_only_the_backward_pass(tiny: Any) -> None:
    config = peft.tuners.lora.config
    if not hasattr(config, "VeloraConfig"):
        pytest.skip("this peft has no VeLoRA")
    trained = tiny.train(velora_config=config.VeloraConfig(num_groups=4))
    served = tiny.serve(trained.base, match(load_adapter(trained.path), tiny.layers(trained.base)))
    torch.testing.assert_close(served, trained.logits, rtol=1e-9, atol=1e-9)


def test_alora_tokens_are_in_the_spec(tiny: Any) -> None:
    trained = tiny.train(
        with_logits=False, alora_invocation_tokens=[4, 2], task_type="CAUSAL_LM"
    )  # fmt: skip
    adapter = load_adapter(trained.path)
    assert adapter.spec.alora_invocation_tokens == (4, 2)
    assert adapter.features == {"alora"}


@pytest.mark.parametrize("init", ["olora", "pissa_niter_4", "corda", "lora_ga", "loftq", "foo"])
def test_inits_that_change_the_base_are_refused(init: str, tiny: Any) -> None:
    trained = tiny.train(with_logits=False)
    trained.edit_config(init_lora_weights=init)
    with pytest.raises(UnsupportedAdapterError, match=f"init_lora_weights='{init}'"):
        load_adapter(trained.path)


@pytest.mark.filterwarnings("ignore:PiSSA changes the base weights")
def test_pissa_is_refused_and_its_conversion_loads(tiny: Any) -> None:
    """The way out that the message names gives peft's numbers on the original base."""
    base = tiny.model("llama-fp32")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    config.init_lora_weights = True
    model.save_pretrained(tiny.folder / "initial")
    config.init_lora_weights = "pissa"
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    expected = tiny.output(model)

    model.save_pretrained(tiny.folder / "as-trained")
    with pytest.raises(UnsupportedAdapterError, match="path_initial_model_for_weight_conversion"):
        load_adapter(tiny.folder / "as-trained")
    residual = load_adapter(tiny.folder / "as-trained", allow_modified_base=True)
    assert residual.spec.init_lora_weights == "pissa"

    model.save_pretrained(
        tiny.folder / "converted",
        path_initial_model_for_weight_conversion=tiny.folder / "initial",
    )
    adapter = load_adapter(tiny.folder / "converted")
    assert adapter.max_rank == 8
    double = copy.deepcopy(base).double()
    served = tiny.serve(double, match(adapter, tiny.layers(double)))
    assert (served - tiny.output(double)).abs().max() > 1e-3
    # peft takes the weights apart and puts them together again in float32.
    torch.testing.assert_close(served.float(), expected, rtol=1e-4, atol=1e-4)
