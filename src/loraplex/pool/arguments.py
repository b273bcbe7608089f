"""What a pool's arguments have to be, checked before anything is made of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from loraplex.adapters import LayerShape
from loraplex.adapters.shapes import LayerIndex
from loraplex.pool.timeline import Timeline

MAX_INT32 = 2**31 - 1
"""What indices of slots and sizes of layers fit into."""


def check_flag(name: str, value: object) -> None:
    """Require a bool: any other value would count as true or false by accident."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r:.80}")


def check_layers(layers: object) -> dict[str, LayerShape]:
    """Require shapes by name, no two of which answer to one name of an adapter's."""
    if not isinstance(layers, Mapping):
        raise TypeError(f"layers must map names to LayerShape, got {layers!r:.80}")
    found: dict[Any, Any] = dict(layers)
    if not found:
        raise ValueError("layers must name at least one layer, got none")
    for name, shape in found.items():
        if not isinstance(name, str) or not isinstance(shape, LayerShape):
            raise TypeError(f"layers must map names to LayerShape, got {name!r}: {shape!r:.80}")
        if max(shape.in_features, shape.out_features) > MAX_INT32:
            raise ValueError(f"layers[{name!r}] must have sizes that fit int32, got {shape!r:.80}")
    LayerIndex(found)
    return found


def check_options(
    *,
    base_weight: object,
    base_bias: object,
    has_bias: object,
    base_model: object,
    disk_dir: object,
    timeline: object,
) -> None:
    """Require what the pool only uses later, or hands on."""
    for name, function in (("base_weight", base_weight), ("base_bias", base_bias)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function of a layer's name, got {function!r:.80}")
    if has_bias is not None and not isinstance(has_bias, bool):
        raise TypeError(f"has_bias must be True, False or None, got {has_bias!r:.80}")
    if base_model is not None and not isinstance(base_model, str):
        raise TypeError(f"base_model must be a str or None, got {base_model!r:.80}")
    is_path = isinstance(disk_dir, str | os.PathLike) and isinstance(os.fspath(disk_dir), str)
    if disk_dir is not None and not is_path:
        raise TypeError(f"disk_dir must be a str or PathLike[str], got {disk_dir!r:.80}")
    # Not isinstance with the protocol, which would not find what an object passes on to another.
    methods = [name for name in vars(Timeline) if not name.startswith("_")]
    lacking = [name for name in methods if not callable(getattr(timeline, name, None))]
    if timeline is not None and lacking:
        raise TypeError(f"timeline must be a Timeline, got {timeline!r:.80} without {lacking[0]}")
