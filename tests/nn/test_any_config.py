"""Any mixture of PEFT's options gives PEFT's logits, or is refused by name with nothing changed."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import loraplex as lp

pytestmark = pytest.mark.hf

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
NORMS = ["norm", "input_layernorm", "post_attention_layernorm"]


def some_of(choices: st.SearchStrategy[Any], most: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(choices, min_size=1, max_size=most, unique=True)


TARGETS = st.one_of(
    st.just("all-linear"),
    some_of(st.sampled_from([*LINEAR, "embed_tokens"]), 5),
    st.sampled_from([r".*\.(q|down)_proj", r"model\.layers\.1\..*(k_proj|up_proj)"]),
)
PATTERNS = st.sampled_from(["q_proj", "layers.0.*", r"model\.layers\.1\..*", "mlp.up_proj", ".*"])
CONFIGS = st.fixed_dictionaries(
    {
        "target_modules": TARGETS,
        "r": st.sampled_from([1, 4, 5, 8, 40]),
        "lora_alpha": st.sampled_from([0.5, 4, 8, 16]),
    },
    optional={
        "use_rslora": st.just(True),
        "rank_pattern": st.dictionaries(PATTERNS, st.sampled_from([1, 3, 24]), max_size=2),
        "alpha_pattern": st.dictionaries(PATTERNS, st.sampled_from([1, 7.5, 24]), max_size=2),
        "use_dora": st.just(True),
        "bias": st.sampled_from(["all", "lora_only"]),
        "modules_to_save": some_of(st.sampled_from([*NORMS, "embed_tokens", "lm_head"]), 2),
        "trainable_token_indices": some_of(st.integers(0, 95), 9),
        "ensure_weight_tying": st.just(True),
        "exclude_modules": st.just(["layers.0.self_attn.q_proj"]),
    },
)  # fmt: skip
counter = itertools.count()


def logits(model: Any, prompts: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(**prompts, **options).logits
    return out


@pytest.mark.filterwarnings("ignore")  # PEFT has something to say about most of these
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.generate],  # a failure is small enough, and a smaller one takes minutes
)
@given(config=CONFIGS)
def test_logits_are_those_of_peft(
    config: dict[str, Any], is_tied: bool, make_llama: Any, make_adapter: Any, with_peft: Any,
    prompts: Any, device: torch.device, tmp_path: Path,
) -> None:  # fmt: skip
    base = make_llama(tie_word_embeddings=is_tied)
    try:
        folder = make_adapter(base, tmp_path / str(next(counter)), 5, **config)
        adapted = with_peft(base.to(device), folder)
        eager = logits(adapted, prompts)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return  # PEFT does not take it
    truth = logits(adapted.double(), prompts)
    alone = logits(base, prompts)
    model = lp.attach(base)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.add_adapter("a", folder)
    except lp.UnsupportedAdapterError as error:
        if "weights of two kinds" not in str(error):
            raise
        assert model.adapter_names() == []
        return
    mixed = logits(model, prompts, adapter_names=["a", None, "a", "a", None, "a", "a"])
    rows = [0, 2, 3, 5, 6]
    mask = prompts["attention_mask"].bool()[rows]
    peft_error = (eager - truth)[rows][mask].abs().max()
    rounding = torch.finfo(torch.float32).eps * truth[rows][mask].abs().max()
    assert (mixed - truth)[rows][mask].abs().max() <= 4 * (peft_error + rounding)
    if device.type == "cpu":
        assert torch.equal(mixed[1::3], alone[1::3])
