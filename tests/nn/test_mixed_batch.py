"""A mixed batch gives each row what PEFT gives it with that row's adapter alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import loraplex as lp

pytestmark = pytest.mark.hf

MIXED = ["attention", None, "rslora", "patterns", "mlp", "dora", "lora_bias"]
MIXES = {
    "all-kinds": MIXED,
    "reversed": MIXED[::-1],
    "one-adapter": ["dora"] * 7,
    "one-adapter-some-base": ["rslora", None, None, "rslora", None, "rslora", "rslora"],
    "peft-spelling-of-base": ["mlp", "__base__", "mlp", "__base__", "dora", "__base__", None],
    "all-base": [None] * 7,
}


def attach_all(model: Any, adapters: Mapping[str, Path], **options: Any) -> Any:
    model = lp.attach(model, **options)
    for name, folder in adapters.items():
        model.add_adapter(name, folder)
    return model


def folder_of(adapters: Mapping[str, Path], name: str | None) -> Path | None:
    return None if name in (None, "__base__") else adapters[name]


@pytest.mark.parametrize("mix", MIXES)
def test_logits_are_as_close_to_float64_as_peft_is(
    mix: str, llama: Any, adapters: Mapping[str, Path], prompts: Any, with_peft: Callable[..., Any]
) -> None:
    names = MIXES[mix]
    expected, eager = [], []
    for row, name in enumerate(names):
        one = {key: value[row : row + 1] for key, value in prompts.items()}
        single = with_peft(llama, folder_of(adapters, name))
        with torch.no_grad():
            # the same padded batch, so that attention takes the same way in both
            eager.append(single(**prompts).logits[row : row + 1])
            expected.append(single.double()(**one).logits)
    model = attach_all(llama, adapters)
    with torch.no_grad():
        ours = model(**prompts, adapter_names=names).logits
    mask = prompts["attention_mask"].bool()
    truth, peft_logits = torch.cat(expected)[mask], torch.cat(eager)[mask]
    error = (ours[mask].double() - truth).abs().max()
    peft_error = (peft_logits.double() - truth).abs().max()
    rounding = torch.finfo(torch.float32).eps * truth.abs().max()
    assert error <= 2 * peft_error + rounding


def test_base_rows_are_the_bits_of_the_model_alone(
    llama: Any, adapters: Mapping[str, Path], prompts: Any
) -> None:
    with torch.no_grad():
        alone = llama(**prompts).logits
        model = attach_all(llama, adapters)
        mixed = model(**prompts, adapter_names=MIXED).logits
        without_names = model(**prompts).logits
    assert torch.equal(without_names, alone)
    base = [row for row, name in enumerate(MIXED) if name is None]
    other = [row for row, name in enumerate(MIXED) if name is not None]
    if llama.device.type == "cpu":
        assert torch.equal(mixed[base], alone[base])
    else:
        # On a GPU another GEMM than cuBLAS may run, whose bits are its own.
        torch.testing.assert_close(mixed[base], alone[base], atol=1e-4, rtol=1e-4)
    assert (mixed[other] - alone[other]).abs().amax(dim=(1, 2)).min() > 0.1


@dataclass(frozen=True)
class Mode:
    """A way of generating."""

    options: dict[str, Any] = field(default_factory=dict)
    copies: int = 1


MODES = {
    "greedy": Mode(),
    "no-cache": Mode({"use_cache": False}),
    "chunked-prompt": Mode({"prefill_chunk_size": 4}),
    # compiling the reference would take most of a minute a call, and proves nothing here
    "static-cache": Mode({"cache_implementation": "static", "disable_compile": True}),
    "beams": Mode({"num_beams": 3}),
    "beams-returning-two": Mode({"num_beams": 3, "num_return_sequences": 2}, copies=2),
}


@pytest.mark.parametrize("mode", MODES)
def test_generation_equals_peft_one_adapter_at_a_time(
    mode: str, llama: Any, adapters: Mapping[str, Path], prompts: Any, with_peft: Callable[..., Any]
) -> None:
    options = {"do_sample": False, "max_new_tokens": 8} | MODES[mode].options
    copies = MODES[mode].copies
    expected = []
    for row, name in enumerate(MIXED):
        one = {key: value[row : row + 1] for key, value in prompts.items()}
        expected.append(with_peft(llama, folder_of(adapters, name)).generate(**one, **options))
    model = attach_all(llama, adapters)
    ours = model.generate(**prompts, **options, adapter_names=MIXED)
    assert ours.shape[0] == copies * len(MIXED)
    assert ours.tolist() == torch.cat(expected).tolist()
    base = model.generate(**prompts, **options)
    changed = [(ours[row] != base[row]).any().item() for row in range(ours.shape[0])]
    assert sum(changed) >= 0.7 * copies * sum(name is not None for name in MIXED)


def test_sampled_copies_use_their_own_rows_adapter(
    llama: Any, adapters: Mapping[str, Path], prompts: Any
) -> None:
    model = attach_all(llama, adapters)
    options = {"max_new_tokens": 6, "do_sample": True, "top_k": 1, "num_return_sequences": 3}
    sampled = model.generate(**prompts, **options, adapter_names=MIXED)
    greedy = model.generate(**prompts, max_new_tokens=6, do_sample=False, adapter_names=MIXED)
    assert sampled.tolist() == greedy.repeat_interleave(3, dim=0).tolist()


def test_rows_do_not_depend_on_padding(
    llama: Any, adapters: Mapping[str, Path], prompts: Any
) -> None:
    model = attach_all(llama, adapters)
    options = {"max_new_tokens": 8, "do_sample": False}
    together = model.generate(**prompts, **options, adapter_names=MIXED)[:, -8:]
    for row, name in enumerate(MIXED):
        length = int(prompts["attention_mask"][row].sum())
        ids = prompts["input_ids"][row : row + 1, -length:]
        alone = model.generate(ids, **options, adapter_names=[name])
        assert alone[0, -8:].tolist() == together[row].tolist()


def test_gpt2_conv1d_layers_equal_peft(
    tmp_path: Path, device: torch.device, with_peft: Callable[..., Any], make_adapter: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=96, n_positions=32, n_embd=24, n_layer=2, n_head=2, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    folders = {
        "plain": make_adapter(model, tmp_path / "plain", r=4, target_modules=["c_attn", "c_fc"]),
        "dora": make_adapter(
            model, tmp_path / "dora", r=2, use_dora=True, target_modules=["c_proj"]
        ),
    }
    model = model.to(device)
    ids = torch.randint(96, (3, 5), device=device)
    names = ["dora", None, "plain"]
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    expected = [
        with_peft(model, folder_of(folders, name)).generate(input_ids=ids[row : row + 1], **options)
        for row, name in enumerate(names)
    ]
    ours = attach_all(model, folders).generate(ids, **options, adapter_names=names)
    assert ours.tolist() == torch.cat(expected).tolist()


def test_bare_model_takes_an_adapter_of_the_causal_lm(
    llama: Any, adapters: Mapping[str, Path], prompts: Any, with_peft: Callable[..., Any]
) -> None:
    with torch.no_grad():
        single = with_peft(llama, adapters["rslora"])
        expected = single(**prompts, output_hidden_states=True).hidden_states[-1]
        model = lp.attach(llama.model)
        model.add_adapter("rslora", adapters["rslora"])
        ours = model(**prompts, adapter_names=["rslora"] * 7).last_hidden_state
    mask = prompts["attention_mask"].bool()
    torch.testing.assert_close(ours[mask], expected[mask], atol=1e-4, rtol=1e-4)
