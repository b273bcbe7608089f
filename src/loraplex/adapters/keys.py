"""Tensor names of adapter files → (module, role), for every spelling that PEFT writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal[
    "lora_a",  # [rank, in_features]
    "lora_b",  # [out_features, rank]
    "lora_bias",  # lora_B.bias
    "embedding_a",  # [rank, vocabulary]
    "embedding_b",  # [hidden, rank]
    "magnitude",  # DoRA
    "base",  # the frozen parameter of the wrapped layer
    "saved",  # a full replacement (modules_to_save)
    "token_rows",  # trainable_token_indices
    "plain",  # <module>.<parameter>; what it is depends on the config
    "training",  # state that only training uses
    "unknown",
]

MAX_NAME = 1000
# Wrappers that never are part of a model's own names.
WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))

LORA_ROLES: dict[tuple[str, str], Role] = {
    ("lora_A", "weight"): "lora_a",
    ("lora_B", "weight"): "lora_b",
    ("lora_B", "bias"): "lora_bias",
    ("lora_embedding_A", ""): "embedding_a",
    ("lora_embedding_A", "weight"): "embedding_a",
    ("lora_embedding_B", ""): "embedding_b",
    ("lora_embedding_B", "weight"): "embedding_b",
    ("lora_magnitude_vector", ""): "magnitude",
    ("lora_magnitude_vector", "weight"): "magnitude",
    ("lora_velora_embed", ""): "training",
    ("trainable_tokens_delta", ""): "token_rows",
}
LORA_LEAVES = frozenset(leaf for leaf, _ in LORA_ROLES)


@dataclass(frozen=True)
class TensorKey:
    """One parsed tensor name.

    `depth` counts the ``base_layer`` parts right before the leaf: PEFT nests one wrapper per
    targeted parameter of a module, the innermost being the first parameter. `adapter` is the
    adapter's name where the file kept it (``lora_A.default.weight``), else None.
    """

    raw: str
    module: str
    role: Role
    parameter: str = ""
    depth: int = 0
    adapter: str | None = None


def parse_key(raw: str) -> TensorKey:
    """Parse one tensor name.

    Example:
        >>> parse_key("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight").module
        'model.layers.0.self_attn.q_proj'
        >>> parse_key("model.norm.lora_B.default.weight").adapter
        'default'
    """
    parts = [part for part in raw.split(".") if part not in WRAPPERS]
    while parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    # No module has a name that would break a line of a message or of a log.
    if len(parts) < 2 or "" in parts or not raw.isprintable() or len(raw) > MAX_NAME:
        return TensorKey(raw, "", "unknown")
    for index in reversed(range(len(parts))):
        if parts[index] in LORA_LEAVES:
            return _lora_key(raw, parts[:index], parts[index], parts[index + 1 :])
    if any(part.startswith(("lora_", "modules_to_save")) for part in parts[-2:-1] + parts[-1:]):
        if parts[-2] == "modules_to_save":
            return TensorKey(raw, _clean(parts[:-2]), "saved", parts[-1])
        return TensorKey(raw, "", "unknown")
    if len(parts) > 3 and parts[-3] == "modules_to_save":
        return TensorKey(raw, _clean(parts[:-3]), "saved", parts[-1], adapter=parts[-2])
    if parts[-2] in ("base_layer", "original_module") and len(parts) > 2:
        module = [part for part in parts[:-2] if part != "token_adapter"]
        return TensorKey(raw, _clean(module), "base", parts[-1])
    return TensorKey(raw, _clean(parts[:-1]), "plain", parts[-1])


def _lora_key(raw: str, path: list[str], leaf: str, rest: list[str]) -> TensorKey:
    """Roles of ``leaf``, ``leaf.weight``, ``leaf.<adapter>`` and ``leaf.<adapter>.weight``."""
    depth = 0
    while path and path[-1] == "base_layer":
        path = path[:-1]
        depth += 1
    if leaf == "trainable_tokens_delta" and path[-1:] == ["token_adapter"]:
        path = path[:-1]
    module = _clean(path)
    adapter: str | None = None
    suffix = ".".join(rest)
    if (leaf, suffix) not in LORA_ROLES and rest:
        adapter, suffix = rest[0], ".".join(rest[1:])
    role = LORA_ROLES.get((leaf, suffix), "unknown")
    if not module:
        role = "unknown"
    return TensorKey(raw, module, role, depth=depth, adapter=adapter)


def _clean(path: list[str]) -> str:
    return ".".join(part for part in path if part != "base_layer")


def foreign_format(keys: list[str]) -> str | None:
    """The name of another adapter format that the tensor names belong to, if it is a known one."""
    for key in keys:
        if ".lora_down." in key or ".lora_up." in key or key.startswith("lora_unet_"):
            return "kohya (lora_down, lora_up)"
        if key.endswith((".lora_a", ".lora_b")):
            return "MLX (lora_a, lora_b, transposed)"
        if ".lora.up." in key or ".lora.down." in key:
            return "old diffusers (lora.up, lora.down)"
    return None
