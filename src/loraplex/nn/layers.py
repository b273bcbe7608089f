"""Which layers of a model can have adapters, and why others cannot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from loraplex.adapters import LayerShape, shape_in_model

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The members of a stack of experts run on a selection of the tokens, each on its own.
EXPERT = re.compile(r"\.experts\.\d+\.")
# How quantised and adapted layers of other libraries say that they are linear layers.
SIZES = (("in_features", "out_features"), ("infeatures", "outfeatures"))


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is GPT-2's ``Conv1D``: a linear layer with its weight stored [K, N]."""
    return (
        type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"
    )


def oriented_weight(layer: nn.Linear) -> Tensor:
    """The weight of a supported layer as [N, K], whatever its storage."""
    return layer.weight.t() if is_conv1d(layer) else layer.weight


def shape_of(name: str, layer: nn.Linear, config: Any) -> LayerShape:
    """The sizes of a supported layer, read from its weight; fused projections are packed layers."""
    out_features, in_features = oriented_weight(layer).shape
    return shape_in_model(name, in_features, out_features, config)


def find_layers(model: nn.Module, exclude: Sequence[str]) -> dict[str, nn.Linear]:
    """Every linear layer of a model by its path, without those that ``exclude`` names.

    They are typed as ``nn.Linear``, whose weight and bias ``Conv1D`` has as well.

    Args:
        exclude: names of layers or parts of the model to leave alone: whole paths, or the end of
            one (``"lm_head"``, ``"mlp.gate_proj"``), or a part's path (``"model.layers.0"``).

    Raises:
        TypeError: a layer is linear but not of a supported kind (quantised, adapted by another
            library, hooked); names it and its class.
        ValueError: layers on several devices or of several dtypes, none at all, or a name in
            ``exclude`` that fits nothing.
    """
    unused = set(exclude)
    found: dict[str, nn.Linear] = {}
    paths: dict[int, str] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        fitting = [word for word in exclude if _fits(name, word)]
        unused.difference_update(fitting)
        if fitting or not _is_linear(layer) or any(name.startswith(f"{n}.") for n in found):
            continue
        if id(layer) in paths:
            raise TypeError(
                f"layers {paths[id(layer)]!r} and {name!r} are one module in two places"
            )
        paths[id(layer)] = name
        _check_layer(name, layer)
        found[name] = cast(nn.Linear, layer)
    # A model without a head has nothing to leave out by that name.
    unused.discard("lm_head")
    if unused:
        strangers = ", ".join(f"{word!r:.80}" for word in sorted(unused))
        raise ValueError(f"exclude names no part of the model: {strangers}")
    if not found:
        raise ValueError(f"model must have linear layers, {type(model).__name__} has none left")
    _check_same(found)
    return found


def _fits(name: str, word: str) -> bool:
    return name == word or name.endswith(f".{word}") or name.startswith(f"{word}.")


def _is_linear(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Linear) or is_conv1d(layer):
        return True
    return any(isinstance(getattr(layer, k, None), int) and hasattr(layer, n) for k, n in SIZES)


def _check_layer(name: str, layer: nn.Module) -> None:
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if type(layer) is not nn.Linear and not is_conv1d(layer):
        hint = "; unload PEFT first" if kind.startswith("peft.") else ""
        raise TypeError(
            f"layer {name!r} is a {kind}; attach supports torch.nn.Linear and transformers' Conv1D "
            f"(exclude the layer to leave it without adapters){hint}"
        )
    weight = layer.weight
    if type(getattr(weight, "data", None)) is not Tensor or weight.dtype not in DTYPES:
        raise TypeError(
            f"layer {name!r} must have a float32, float16 or bfloat16 weight, got "
            f"{type(getattr(weight, 'data', weight)).__name__} of {getattr(weight, 'dtype', None)}"
        )
    if weight.device.type == "meta":
        raise TypeError(
            f"layer {name!r} has its weight on the meta device (offloaded or not loaded)"
        )
    if hasattr(layer, "_hf_hook"):
        raise TypeError(
            f"layer {name!r} is moved by accelerate (device_map); load it on one device"
        )
    if layer._forward_hooks or layer._forward_pre_hooks:
        raise TypeError(f"layer {name!r} has forward hooks, which would be left out; remove them")
    if EXPERT.search(f".{name}."):
        raise TypeError(
            f"layer {name!r} is one of several experts, which run on a selection of the tokens; "
            "attach does not route these (exclude them to leave them without adapters)"
        )


def _check_same(layers: dict[str, nn.Linear]) -> None:
    first_name, first = next(iter(layers.items()))
    for name, layer in layers.items():
        for attribute in ("dtype", "device"):
            mine, wanted = getattr(layer.weight, attribute), getattr(first.weight, attribute)
            if mine != wanted:
                raise ValueError(
                    f"all layers must have one {attribute}: {first_name!r} has {wanted}, "
                    f"{name!r} has {mine} (exclude layers to leave them without adapters)"
                )
