"""Any config with any tensors loads and matches, or is an AdapterError in one printable line."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from loraplex.adapters import LayerShape, check_base_copies, load_adapter, match
from loraplex.adapters.spec import _KNOWN_KEYS
from loraplex.errors import AdapterError

Q = "base_model.model.model.layers.0.self_attn.q_proj"
EMBED = "base_model.model.model.embed_tokens"
EXPERTS = "base_model.model.model.layers.0.mlp.experts"

SCALARS = st.sampled_from(
    [None, True, False, 0, 1, 4, -1, 2**63, 10**400, 0.5, 1e308, float("inf"), float("nan"), "",
     "8", "q_proj", "lora", "*", "a\nb", "\x1b[2J"]
)  # fmt: skip
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(
    st.sampled_from(["q_proj", "", "(", "embed_tokens", "a\nb", ".*", "a{999999999999}", "(.*)*x"]),
    SCALARS | st.lists(SCALARS, max_size=2), max_size=2,
)  # fmt: skip
RIGHT = st.sampled_from(
    [{}] * 4 + [
        {"bias": "all"}, {"bias": "lora_only"}, {"use_dora": True}, {"lora_bias": True},
        {"modules_to_save": ["lm_head"]}, {"target_parameters": ["gate_up_proj", "down_proj"]},
        {"trainable_token_indices": [1, 2, 3, 4]},
    ]
)  # fmt: skip
CONFIGS = st.dictionaries(st.sampled_from([*sorted(_KNOWN_KEYS), "foobar"]), VALUES, max_size=3)
NAMES = st.sampled_from(
    [f"{Q}.lora_A.weight", f"{Q}.lora_B.weight", f"{Q}.lora_B.bias", f"{Q}.lora_magnitude_vector",
     f"{Q}.base_layer.bias", f"{Q}.bias", f"{Q}.base_layer.weight", f"{Q}.lora_A.default.weight",
     f"{EMBED}.lora_embedding_A", f"{EMBED}.lora_embedding_B", f"{EMBED}.weight",
     f"{EMBED}.token_adapter.trainable_tokens_delta", f"{EXPERTS}.lora_A.weight",
     f"{EXPERTS}.lora_B.weight", f"{EXPERTS}.base_layer.lora_A.weight",
     f"{EXPERTS}.base_layer.lora_B.weight", f"{EXPERTS}{'.base_layer' * 3}.lora_A.weight",
     f"{EXPERTS}{'.base_layer' * 3}.lora_B.weight", f"{EMBED}.base_layer.lora_embedding_A",
     f"{EMBED}.base_layer.lora_embedding_B", "model.layers.0.mlp.up_proj.bias",
     "lm_head.modules_to_save.weight",
     "base_model.model.lm_head.weight", "lm_head.original_module.weight", "model.norm.bias",
     "lora_A.weight", "", ".", "a\nb.lora_A.weight", "\x1b[2J.lora_B.weight", "x." * 900 + "weight"]
)  # fmt: skip
SHAPES = st.sampled_from(
    [(4, 32), (32, 4), (32,), (4,), (0,), (), (4, 0), (4, 96), (96, 32), (1, 32), (4, 32, 1, 1),
     (16, 32), (32, 16)]
)  # fmt: skip
DTYPES = st.sampled_from([torch.float32] * 6 + [torch.bfloat16, torch.int64, torch.float8_e5m2])
FILLS = st.sampled_from([1.0] * 8 + [float("nan"), float("inf")])
TENSORS = st.dictionaries(
    NAMES,
    st.builds(lambda shape, dtype, fill: torch.full(shape, fill).to(dtype), SHAPES, DTYPES, FILLS),
    max_size=4,
)
LAYERS = {
    "model.layers.0.self_attn.q_proj": LayerShape.plain(32, 32),
    "model.layers.0.mlp.up_proj": LayerShape.plain(32, 32),
}
PARAMETERS = {
    "model.embed_tokens.weight": (96, 32), "lm_head.weight": (96, 32), "model.norm.bias": (32,),
    "model.layers.0.mlp.experts.down_proj": (4, 32, 16),
}  # fmt: skip


@settings(max_examples=600, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=CONFIGS, right=RIGHT, tensors=TENSORS, has_pair=st.booleans(), strict=st.booleans())
def test_it_loads_or_says_why_not(
    config: dict[str, Any],
    right: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    has_pair: bool,
    strict: bool,
    tmp_path: Path,
) -> None:
    pair = {f"{Q}.lora_A.weight": torch.ones(4, 32), f"{Q}.lora_B.weight": torch.ones(32, 4)}
    base = {"peft_type": "LORA", "r": 4, "lora_alpha": 16}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**base, **right, **config}))
    save_file({**(pair if has_pair else {}), **tensors}, tmp_path / "adapter_model.safetensors")
    said: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            adapter = load_adapter(tmp_path, strict=strict)
            adapter.require(adapter.features)
            assert adapter.to(torch.float64).num_bytes >= adapter.num_bytes > 0
            match(adapter, LAYERS, parameters=PARAMETERS, strict=strict)
            bare = check_base_copies(adapter, lambda name: torch.ones(32))
            assert not bare.base_copies
    except AdapterError as error:
        said.append(str(error))
    said += [str(warning.message) for warning in caught]
    assert all(text.isprintable() and len(text) <= 2000 for text in said), said
