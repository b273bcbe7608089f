"""Tensors of one file sorted by what they are, before any of them is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from loraplex.adapters.keys import Role, TensorKey, foreign_format, parse_key
from loraplex.adapters.spec import AdapterSpec
from loraplex.errors import AdapterError, UnsupportedAdapterError

# Modules that PEFT stores whole, without naming them, when the vocabulary was resized.
EMBEDDING_NAMES = frozenset(
    ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")
)
# Parameters that one module of experts declares, in this order: PEFT nests its wrappers in it.
PARAMETER_ORDER = ("gate_up_proj", "down_proj")

Group = dict[Role, torch.Tensor]
PAIRS: tuple[tuple[Role, Role], ...] = (("lora_a", "lora_b"), ("embedding_a", "embedding_b"))


@dataclass
class SortedTensors:
    """The tensors of a file by their use; LoRA tensors by (module, depth of PEFT's wrappers)."""

    lora: dict[tuple[str, int], Group] = field(default_factory=dict)
    base: dict[str, torch.Tensor] = field(default_factory=dict)
    saved: dict[str, torch.Tensor] = field(default_factory=dict)
    biases: dict[str, torch.Tensor] = field(default_factory=dict)
    token_rows: dict[str, torch.Tensor] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def sort_tensors(
    tensors: Mapping[str, torch.Tensor], spec: AdapterSpec, label: str, *, strict: bool
) -> SortedTensors:
    """Put every tensor where it belongs.

    Raises:
        AdapterError: two names for one tensor, several adapters in one file, half a pair, or
            (when strict) a name that is neither LoRA nor in modules_to_save.
        UnsupportedAdapterError: the names are of another adapter format.
    """
    keys = [parse_key(raw) for raw in sorted(tensors)]  # a file has no order to rely on
    _check_adapter_names(keys, label)
    _check_distinct(keys, label)
    adapted = {key.module for key in keys if key.role in ("lora_a", "lora_b", "embedding_a")}
    parts = SortedTensors()
    for key in keys:
        _place(parts, key, tensors[key.raw], spec, adapted, label)
    if parts.unknown:
        foreign = foreign_format(parts.unknown)
        if foreign is not None:
            raise UnsupportedAdapterError(
                f"{label}: the tensor names are of the {foreign} format, not PEFT's: "
                + sample(parts.unknown)
            )
        if strict:
            raise AdapterError(
                f"{label}: {len(parts.unknown)} of {len(tensors)} tensors have names that are "
                "neither LoRA nor listed in modules_to_save (strict=False ignores them): "
                + sample(parts.unknown)
            )
    _check_complete(parts.lora, label)
    _check_nesting(parts.lora, label)
    return parts


def _place(
    parts: SortedTensors,
    key: TensorKey,
    tensor: torch.Tensor,
    spec: AdapterSpec,
    adapted: set[str],
    label: str,
) -> None:
    full = f"{key.module}.{key.parameter}"
    is_trained_bias = spec.bias != "none" and key.parameter == "bias"
    table: dict[str, torch.Tensor] | None = None
    if key.role == "token_rows":
        table, full = parts.token_rows, key.module
    elif key.role == "saved":
        table = parts.saved
    elif key.role == "base" or (key.role == "plain" and key.module in adapted and is_trained_bias):
        table = parts.base  # old PEFT wrote q_proj.bias, new PEFT q_proj.base_layer.bias
    elif key.role == "plain" and key.module not in adapted and is_saved(key.module, spec):
        table = parts.saved
    elif key.role == "plain" and key.module not in adapted and is_trained_bias:
        table, full = parts.biases, key.module
    elif key.role in ("plain", "unknown"):
        parts.unknown.append(key.raw)
    elif key.role != "training":
        parts.lora.setdefault((key.module, key.depth), {})[key.role] = tensor
    if table is not None:
        if full in table:  # lm_head.weight beside lm_head.modules_to_save.weight
            raise AdapterError(
                f"{label}: {key.raw!r:.200} and another spelling name the same tensor, {full}"
            )
        table[full] = tensor


def is_saved(module: str, spec: AdapterSpec) -> bool:
    """Whether PEFT stores a module whole: it is listed, or a part of one that is."""
    listed = any(is_within(module, entry) for entry in spec.modules_to_save)
    return listed or module.rpartition(".")[2] in EMBEDDING_NAMES


def is_within(module: str, entry: str) -> bool:
    """PEFT's own rule for modules_to_save, the end of a path, even inside a word; here also of a
    parent's path, since a module that is stored whole brings what is inside it."""
    parts = module.split(".")
    return any(".".join(parts[:count]).endswith(entry) for count in range(1, len(parts) + 1))


def _check_adapter_names(keys: Iterable[TensorKey], label: str) -> None:
    names = {key.adapter for key in keys if key.role not in ("plain", "base", "saved")}
    if len(names) > 1:
        shown = sorted("none" if name is None else repr(name) for name in names)
        raise AdapterError(
            f"{label}: the tensor names carry several adapter names ({', '.join(shown)}): a file "
            "must hold one adapter, spelled in one way, as peft's save_pretrained writes it"
        )


def _check_distinct(keys: Iterable[TensorKey], label: str) -> None:
    seen: dict[tuple[object, ...], str] = {}
    for key in keys:
        place = (key.module, key.depth, key.role, key.parameter)
        if key.role != "unknown" and place in seen:
            raise AdapterError(
                f"{label}: {seen[place]!r:.200} and {key.raw!r:.200} name the same tensor"
            )
        seen[place] = key.raw


def _check_complete(groups: Mapping[tuple[str, int], Group], label: str) -> None:
    incomplete: list[str] = []
    for (name, _), group in groups.items():
        halves = [[role for role in pair if role in group] for pair in PAIRS]
        if sorted(len(half) for half in halves) != [0, 2]:
            incomplete.append(f"{name} (has only {', '.join(sorted(group))})")
    if incomplete:
        raise AdapterError(
            f"{label}: {len(incomplete)} of {len(groups)} modules are incomplete: "
            + sample(incomplete)
        )


def _check_nesting(groups: Iterable[tuple[str, int]], label: str) -> None:
    """PEFT puts one wrapper around another, so none is missing between the first and the last."""
    depths: dict[str, list[int]] = {}
    for name, depth in groups:
        depths.setdefault(name, []).append(depth)
    for name, found in depths.items():
        if len(found) > 1 and sorted(found) != list(range(len(found))):
            raise AdapterError(
                f"{label}: {name}: {len(found)} nested LoRA layers must lie in 0 to "
                f"{len(found) - 1} base_layer parts, got {sorted(found)}"
            )


def parameter_of(name: str, depth: int, levels: int, spec: AdapterSpec, label: str) -> str | None:
    """The parameter (``target_parameters``) of a LoRA pair, or None: it is the module's own.

    Args:
        name, depth: module, and how deep PEFT's wrapper of the pair lies.
        levels: LoRA pairs of that module.

    Raises:
        UnsupportedAdapterError: the names leave open which parameter it is.
    """
    targets: dict[str, bool] = {}  # parameter → the entry names the module too
    for entry in spec.target_parameters:
        path, _, parameter = entry.rpartition(".")
        if f".{name}".endswith(f".{path}" if path else ""):
            targets[parameter] = targets.get(parameter, False) or bool(path)
    # A bare "down_proj" fits every module; then the module has to be one of experts.
    is_meant = any(targets.values()) or name.rpartition(".")[2] == "experts"
    if levels == 1 and depth == 0 and not (targets and is_meant):
        return None
    if len(targets) == levels == 1:
        return f"{name}.{next(iter(targets))}"
    ordered = [parameter for parameter in PARAMETER_ORDER if parameter in targets]
    if len(ordered) != levels or len(targets) != levels:
        raise UnsupportedAdapterError(
            f"{label}: {name}: cannot tell which of target_parameters={sorted(targets)} the "
            f"{levels} nested LoRA layers (base_layer) belong to"
        )
    # The deepest wrapper was put on first, around the parameter that is declared first.
    return f"{name}.{ordered[levels - 1 - depth]}"


def sample(names: Iterable[str], count: int = 4) -> str:
    """A few names for a message, and how many more there are."""
    ordered = sorted(names)
    shown = ", ".join(printable(name) for name in ordered[:count])
    return shown + (f" and {len(ordered) - count} more" if len(ordered) > count else "")


def printable(text: str, limit: int = 200) -> str:
    """The beginning of a text from a file, with all that could move a terminal's cursor escaped."""
    text = text[:limit]
    return text if text.isprintable() else repr(text)[1:-1]
