"""The linear layers of a model that LoRA adapts, by the model's name or from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Layer:
    """One linear layer: K in-features and the widths of its outputs."""

    name: str
    k: int
    slices: tuple[int, ...]

    @property
    def n(self) -> int:
        """Out-features."""
        return sum(self.slices)


@dataclass(frozen=True)
class ModelLayers:
    """The four linear layers of a decoder block, and how many blocks there are."""

    name: str
    blocks: int
    layers: tuple[Layer, ...]


# What config.json of each model says, and the tensor-parallel degree that it is served at.
CONFIGS: Mapping[str, tuple[Mapping[str, int], int]] = {
    "llama-3-8b": ({
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": 32,
    }, 1),
    "llama-3-70b-tp8": ({
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "num_hidden_layers": 80,
    }, 8),
    "qwen3-32b": ({
        "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 64,
    }, 1),
}  # fmt: skip

# Small enough for Triton's interpreter, with slices of unequal width like a real model's.
TINY = ModelLayers("tiny", 2, (
    Layer("qkv", 64, (64, 32, 32)),
    Layer("o", 64, (64,)),
    Layer("gate_up", 64, (96, 96)),
    Layer("down", 96, (64,)),
))  # fmt: skip


def find_model(name: str, tp: int = 0) -> ModelLayers:
    """Layers of a model that is known by name, or of a config.json in transformers' form.

    Args:
        name: one of ``CONFIGS``, a config.json, or a folder with one.
        tp: tensor-parallel degree, one shard's layers; 0: as the name says, 1 for a file.

    Raises:
        ValueError: no such model, a field is missing, or tp does not divide the layers.

    Example:
        >>> [(layer.name, layer.k, layer.n) for layer in find_model("llama-3-8b").layers]
        [('qkv', 4096, 6144), ('o', 4096, 4096), ('gate_up', 4096, 28672), ('down', 14336, 4096)]
    """
    if name in CONFIGS:
        config, own = CONFIGS[name]
        return from_config(name, config, tp or own)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = ", ".join(CONFIGS)
        raise ValueError(f"model must be one of {known}, or a config.json, got {name!r}")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}")
    return from_config(str(path), content, tp or 1)


def from_config(name: str, config: Mapping[str, Any], tp: int) -> ModelLayers:
    """Layers of one of ``tp`` shards of a dense decoder.

    Raises:
        ValueError: a field is missing or no positive whole number, or tp does not divide.
    """
    # models that also see or hear keep their decoder's fields one level down
    config = config.get("text_config", config)
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            raise ValueError(f"{name} is a mixture of experts ({key}), whose layers are no linears")

    def field(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: {key} must be a positive whole number, got {value!r}")
        return value

    def share(what: str, size: int) -> int:
        if size % tp:
            raise ValueError(f"{name}: tp={tp} does not divide {what} ({size})")
        return size // tp

    hidden, heads = field("hidden_size"), field("num_attention_heads")
    head_dim = field("head_dim", hidden // heads)
    # with fewer key-value heads than shards every shard holds a copy of one
    kv_heads = max(tp, field("num_key_value_heads", heads))
    q = share("num_attention_heads", heads) * head_dim
    kv = share("num_key_value_heads", kv_heads) * head_dim
    inner = share("intermediate_size", field("intermediate_size"))
    return ModelLayers(name, field("num_hidden_layers"), (
        Layer("qkv", hidden, (q, kv, kv)),
        Layer("o", q, (hidden,)),
        Layer("gate_up", hidden, (inner, inner)),
        Layer("down", inner, (hidden,)),
    ))  # fmt: skip
