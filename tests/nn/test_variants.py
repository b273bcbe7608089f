"""PEFT's variants end to end: alone and beside plain LoRA and base rows, PEFT's own logits."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import loraplex as lp
from loraplex.nn import LoraEmbedding

pytestmark = [
    pytest.mark.hf,
    # what PEFT says about tied weights and stored embeddings while the adapters are made
    pytest.mark.filterwarnings(
        "ignore:.*(tie_word_embeddings|save_embedding_layers|tied|lora_bias=True|config file).*"
    ),
]

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PLAIN = {"llama": ["q_proj", "down_proj"], "phi3": ["o_proj", "qkv_proj"], "gpt2": ["c_attn"]}
TOKENS = [92, 50, 45, 31]  # all in the prompts
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One way to configure PEFT, the model it is served on, and another that it is trained on."""

    name: str
    config: dict[str, Any]
    model: str
    trained_on: str


def variant(name: str, model: str = "llama", trained_on: str = "", **config: Any) -> Variant:
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | config
    return Variant(name, config, model, trained_on or model)


VARIANTS = [
    variant("plain-all-linear", target_modules="all-linear"),
    variant("L01-rslora", use_rslora=True, r=16),
    variant("L04-rslora-patterns", r=8, use_rslora=True, target_modules=["q_proj", "v_proj"],
            rank_pattern={"q_proj": 48}, alpha_pattern={"q_proj": 32}),
    variant("L07-layers-to-transform", layers_to_transform=[1], layers_pattern="layers"),
    variant("L08-regex-targets", target_modules=r".*layers\.[02]\.self_attn\.(q|v)_proj"),
    variant("L14-dora", use_dora=True, target_modules=ALL),
    variant("L14-dora-head", use_dora=True, target_modules=["lm_head", "o_proj"]),
    variant("L15-lora-bias", lora_bias=True, target_modules=["q_proj", "o_proj"]),
    variant("bias-all", "llama-biased", bias="all"),
    variant("bias-lora-only", "llama-biased", bias="lora_only"),
    variant("L17-own-head", modules_to_save=["lm_head"]),
    variant("L17-own-head-tied", "llama-tied", modules_to_save=["lm_head"]),
    variant("own-norms", modules_to_save=["norm", "input_layernorm"]),
    variant("own-embedding", modules_to_save=["embed_tokens"]),
    variant("own-embedding-and-head-tied", "llama-tied", modules_to_save=["embed_tokens"],
            ensure_weight_tying=True),
    variant("own-linear-layer", modules_to_save=["up_proj"]),
    variant("own-whole-mlp", "llama-biased", modules_to_save=["mlp"]),
    variant("L19-embedding-only", target_modules=["embed_tokens"]),
    variant("L19-embedding-dora", target_modules=["embed_tokens", "v_proj"], use_dora=True),
    variant("L18-embedding-and-head", target_modules=["q_proj", "embed_tokens", "lm_head"]),
    variant("L18-embedding-and-head-tied", "llama-tied",
            target_modules=["q_proj", "embed_tokens", "lm_head"]),
    variant("L22-head-only", target_modules=["lm_head"]),
    variant("L22-head-only-tied", "llama-tied", target_modules=["lm_head"]),
    variant("ensure-weight-tying", "llama-tied", target_modules=["embed_tokens", "q_proj"],
            ensure_weight_tying=True),
    variant("scaled-embedding", "gemma", target_modules=["embed_tokens", "q_proj"]),
    variant("scaled-embedding-dora", "gemma", target_modules=["embed_tokens", "q_proj"],
            use_dora=True),
    variant("scaled-trainable-tokens", "gemma", trainable_token_indices=TOKENS),
    variant("own-scaled-embedding", "gemma", modules_to_save=["embed_tokens", "q_norm"]),
    variant("trainable-tokens", trainable_token_indices=TOKENS),
    variant("trainable-tokens-tied", "llama-tied", trainable_token_indices=TOKENS),
    variant("phi3-fused", "phi3", target_modules=["qkv_proj", "gate_up_proj"]),
    variant("phi3-fused-dora", "phi3", target_modules=["qkv_proj"], use_dora=True),
    variant("phi3-split", "phi3", "llama", target_modules=ALL),
    variant("L26-phi3-split-in-part", "phi3", "llama", target_modules=["k_proj", "up_proj"],
            use_dora=True),
    variant("llama-fused", "llama", "phi3", target_modules=["qkv_proj", "gate_up_proj"]),
    variant("gpt2-conv1d", "gpt2", target_modules=["c_attn", "c_proj", "c_fc"],
            fan_in_fan_out=True),
    variant("gpt2-bias-all-dora", "gpt2", target_modules=["c_attn"], bias="all", use_dora=True,
            fan_in_fan_out=True),
    variant("gpt2-embedding-and-head", "gpt2", target_modules=["wte", "c_attn", "lm_head"],
            fan_in_fan_out=True),
    variant("gpt2-own-norm", "gpt2", target_modules=["c_attn"], modules_to_save=["ln_f"],
            fan_in_fan_out=True),
]  # fmt: skip


@functools.cache
def model_of(kind: str) -> Any:
    """A tiny model of a kind, the same at every call; never changed."""
    import transformers as hf

    builders: dict[str, Callable[[], Any]] = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
        "llama-biased": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)
        ),
        "llama-tied": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(**SIZES, tie_word_embeddings=True)
        ),
        "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**SIZES)),
        "gemma": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES, head_dim=8)),
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4,
                          eos_token_id=None)
        ),
    }  # fmt: skip
    torch.manual_seed(1)
    model = builders[kind]().eval()
    with torch.no_grad():
        if kind == "phi3":  # the function that "llama" computes, with its projections fused
            model.load_state_dict(fused(model_of("llama").state_dict()))
        else:
            for parameter in model.parameters():
                # larger than the default, so that adapters and positions matter
                parameter.normal_(0, 0.25)
    return model


def fused(split: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Llama's weights under Phi-3's names."""
    found: dict[str, torch.Tensor] = {}
    for packed, members in (("qkv_proj", ["q_proj", "k_proj", "v_proj"]),
                            ("gate_up_proj", ["gate_proj", "up_proj"])):  # fmt: skip
        for name in split:
            if f".{members[0]}." in name:
                parts = [split[name.replace(members[0], member)] for member in members]
                found[name.replace(members[0], packed)] = torch.cat(parts)
    packed_away = {*ALL} - {"o_proj", "down_proj"}
    return found | {n: v for n, v in split.items() if n.split(".")[-2] not in packed_away}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, make_adapter: Any) -> Callable[[str], Path]:
    """A plain LoRA adapter for a kind of model."""

    @functools.cache
    def make(kind: str) -> Path:
        targets = PLAIN.get(kind, PLAIN["llama"])
        return make_adapter(
            model_of(kind), tmp_path_factory.mktemp(kind) / "plain", 9, r=8, target_modules=targets,
            fan_in_fan_out=kind == "gpt2",
        )  # fmt: skip

    return make


def logits(model: Any, inputs: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, **options).logits


def assert_as_close_as_peft(
    ours: torch.Tensor, adapted: Any, inputs: Any, rows: slice = slice(None)
) -> None:
    """Ours is at most twice as far from PEFT in float64 as PEFT in float32 is."""
    mask = inputs["attention_mask"].bool()[rows]
    eager = logits(adapted, inputs)[rows][mask].double()
    truth = logits(adapted.double(), inputs)[rows][mask]
    rounding = torch.finfo(torch.float32).eps * truth.abs().max()
    error = (ours[rows][mask].double() - truth).abs().max()
    assert error <= 2 * (eager - truth).abs().max() + rounding


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: case.name)
def test_logits_equal_peft_alone_and_in_a_mixed_batch(
    case: Variant,
    tmp_path: Path,
    device: torch.device,
    prompts: Any,
    plain: Callable[[str], Path],
    with_peft: Any,
    make_adapter: Any,
) -> None:
    folder = make_adapter(model_of(case.trained_on), tmp_path / "a", 5, **case.config)
    other = plain(case.model)
    base = with_peft(model_of(case.model).to(device), None)
    alone = logits(base, prompts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = lp.attach(base)
        model.add_adapter("variant", folder)
        model.add_adapter("plain", other)
    single = logits(model, prompts, adapter_names=["variant"] * 7)
    names = ["variant", None, "plain", "variant", "plain", None, "variant"]
    mixed = logits(model, prompts, adapter_names=names)

    reference = model_of(case.trained_on).to(device)
    changed = (single - alone).abs().amax(dim=(1, 2)) > 1e-3
    # With one token to attend to, queries and keys change nothing.
    assert changed[prompts["attention_mask"].sum(1) > 1].all()
    assert_as_close_as_peft(single, with_peft(reference, folder), prompts)
    assert_as_close_as_peft(mixed, with_peft(reference, folder), prompts, slice(0, 7, 3))
    adapted = with_peft(model_of(case.model).to(device), other)
    assert_as_close_as_peft(mixed, adapted, prompts, slice(2, 5, 2))
    if device.type == "cpu":
        assert torch.equal(mixed[1::4], alone[1::4])
    assert torch.equal(logits(lp.detach(model), prompts), alone)


def test_S26_each_row_has_its_own_head(
    tmp_path: Path, device: torch.device, prompts: Any, with_peft: Any, make_adapter: Any
) -> None:
    base = model_of("llama")
    own: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    folders = [make_adapter(base, tmp_path / str(seed), seed, **own) for seed in (5, 6)]
    base = base.to(device)
    model = lp.attach(with_peft(base, None))
    for name, folder in zip("ab", folders, strict=True):
        model.add_adapter(name, folder)
    inputs = {key: value[:4] for key, value in prompts.items()}
    ours = logits(model, inputs, adapter_names=["a", "b", "a", "b"])
    for start, folder in enumerate(folders):
        assert_as_close_as_peft(ours, with_peft(base, folder), inputs, slice(start, 4, 2))


OWN_PARTS: dict[str, dict[str, Any]] = {
    "embedding": {"r": 4, "target_modules": ["embed_tokens", "lm_head"]},
    "saved": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "tokens": {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": TOKENS},
}


@pytest.fixture
def own_parts(tmp_path: Path, make_adapter: Any) -> dict[str, Path]:
    base = model_of("llama-tied")
    return {
        name: make_adapter(base, tmp_path / name, seed, ensure_weight_tying=False, **config)
        for seed, (name, config) in enumerate(OWN_PARTS.items())
    }


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation_equals_peft(
    options: Any, device: torch.device, own_parts: Any, prompts: Any, with_peft: Any
) -> None:
    base = model_of("llama-tied").to(device)
    names = ["embedding", None, "saved", "tokens", "saved", "embedding", None]
    options = {"do_sample": False, "max_new_tokens": 6} | options
    expected = []
    for row, name in enumerate(names):
        one = {key: value[row : row + 1] for key, value in prompts.items()}
        single = with_peft(base, None if name is None else own_parts[name])
        expected.append(single.generate(**one, **options))
    model = lp.attach(with_peft(base, None), max_adapters=3)
    for name, folder in own_parts.items():
        model.add_adapter(name, folder)
    assert model.generate(**prompts, **options, adapter_names=names).tolist() == (
        torch.cat(expected).tolist()
    )


def test_parts_leave_the_device_and_come_back(
    device: torch.device, own_parts: Any, prompts: Any, with_peft: Any
) -> None:
    model = lp.attach(with_peft(model_of("llama-tied").to(device), None), max_adapters=1)
    for name, folder in own_parts.items():
        model.add_adapter(name, folder)
    residents = model._loraplex._residents
    before = {name: logits(model, prompts, adapter_names=[name] * 7) for name in own_parts}
    assert len(residents._resident) == 1
    for name, expected in before.items():
        assert torch.equal(logits(model, prompts, adapter_names=[name] * 7), expected)
    for name in own_parts:
        model.remove_adapter(name)
    assert not residents._resident


@pytest.mark.gpu
def test_a_decoding_step_with_parts_never_waits_for_the_gpu(
    device: torch.device, own_parts: Any, with_peft: Any
) -> None:
    model = lp.attach(with_peft(model_of("llama-tied").to(device), None))
    for name, folder in own_parts.items():
        model.add_adapter(name, folder)
    names = ["embedding", None, "saved", "tokens"]
    ids = torch.tensor([[7], [3], [92], [50]], device=device)

    def run() -> torch.Tensor:
        model._loraplex.begin(4, 1)
        return model.lm_head(model.model.norm(model.model.embed_tokens(ids)))

    with torch.no_grad(), model._loraplex.serving(names, 4, may_expand=False):
        expected = run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, expected)


def test_weights_of_a_name_that_was_given_again_are_the_new_ones(
    device: torch.device, own_parts: Any, prompts: Any, with_peft: Any
) -> None:
    base = with_peft(model_of("llama-tied").to(device), None)
    fresh = logits_of_one(with_peft(base, None), own_parts["tokens"], prompts)
    model = lp.attach(base)
    model.add_adapter("a", own_parts["saved"])
    logits(model, prompts, adapter_names=["a"] * 7)
    model.remove_adapter("a")
    model.add_adapter("a", own_parts["tokens"])
    assert torch.equal(logits(model, prompts, adapter_names=["a"] * 7), fresh)


def test_a_step_never_mixes_two_versions_of_a_name(
    device: torch.device, own_parts: Any, prompts: Any, with_peft: Any, monkeypatch: Any
) -> None:
    """Replaced between the look-up of a name and the lease: all of the new one, nothing old."""
    base = with_peft(model_of("llama-tied").to(device), None)
    fresh = logits_of_one(with_peft(base, None), own_parts["embedding"], prompts)
    model = lp.attach(base)
    model.add_adapter("a", own_parts["saved"])
    pool = model._loraplex.pool
    acquire = pool.acquire

    def replace_first(names: Any) -> Any:
        monkeypatch.setattr(pool, "acquire", acquire)
        model.remove_adapter("a")
        model.add_adapter("a", own_parts["embedding"])
        return acquire(names)

    monkeypatch.setattr(pool, "acquire", replace_first)
    assert torch.equal(logits(model, prompts, adapter_names=["a"] * 7), fresh)
    assert pool.stats().leases == 0


def test_bare_model_takes_embeddings_and_norms_of_the_causal_lm(
    tmp_path: Path, device: torch.device, prompts: Any, with_peft: Any, make_adapter: Any
) -> None:
    whole = model_of("llama")
    config: dict[str, Any] = {"target_modules": ["embed_tokens", "q_proj"]}
    folder = make_adapter(whole, tmp_path / "a", r=4, modules_to_save=["norm"], **config)
    whole = whole.to(device)
    with torch.no_grad():
        adapted = with_peft(whole, folder)
        expected = adapted(**prompts, output_hidden_states=True).hidden_states[-1]
        model = lp.attach(with_peft(whole, None).model)
        model.add_adapter("a", folder)
        ours = model(**prompts, adapter_names=["a"] * 7).last_hidden_state
    mask = prompts["attention_mask"].bool()
    torch.testing.assert_close(ours[mask], expected[mask], atol=1e-4, rtol=1e-4)


def logits_of_one(base: Any, folder: Path, prompts: Any) -> torch.Tensor:
    model = lp.attach(base)
    model.add_adapter("a", folder)
    return logits(model, prompts, adapter_names=["a"] * 7)


def test_L20_added_tokens_are_an_error(tmp_path: Path, make_adapter: Any, with_peft: Any) -> None:
    larger = with_peft(model_of("llama"), None)
    larger.resize_token_embeddings(98)
    folder = make_adapter(larger, tmp_path / "a", r=4, target_modules=["q_proj"],
                          modules_to_save=["embed_tokens"])  # fmt: skip
    model = lp.attach(with_peft(model_of("llama"), None))
    with pytest.raises(lp.AdapterError, match=r"98 against 96 rows: were added tokens"):
        model.add_adapter("a", folder)
    assert model.adapter_names() == []


def test_only_tokens_are_embedded_per_row(
    tmp_path: Path, make_adapter: Any, with_peft: Any
) -> None:
    base = model_of("gpt2")
    own = {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    folder = make_adapter(base, tmp_path / "a", **own, modules_to_save=["wpe"])
    model = lp.attach(with_peft(base, None))
    with pytest.raises(lp.UnsupportedAdapterError, match=r"transformer\.wpe, a Embedding: only"):
        model.add_adapter("a", folder)
    assert model.adapter_names() == []


def test_a_module_that_stands_in_shows_what_it_stands_for(
    device: torch.device, own_parts: Any, with_peft: Any
) -> None:
    model = lp.attach(with_peft(model_of("llama-tied").to(device), None))
    keys = list(model.state_dict())
    own = model.get_input_embeddings()
    model.add_adapter("a", own_parts["embedding"])
    shown = model.get_input_embeddings()
    assert isinstance(shown, LoraEmbedding)
    assert shown.embedding_dim == 32
    assert shown.weight is own.weight is model.lm_head.weight
    assert list(model.state_dict()) == keys
    assert lp.detach(model).get_input_embeddings() is own
