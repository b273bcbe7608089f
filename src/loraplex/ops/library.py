"""The one place that registers torch ops."""

from __future__ import annotations

from collections.abc import Callable

import torch

_library = torch.library.Library("loraplex", "DEF")

ROUTED = "Tensor entries, Tensor[] storages, Tensor indices, Tensor places, Tensor plan"
LAYOUT = "int[] slices, int[] layout, str impl"


def register(schema: str, function: Callable[..., object], fake: Callable[..., object]) -> None:
    """Define one op of the ``loraplex`` namespace for every device."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"loraplex::{name}", fake, lib=_library)
