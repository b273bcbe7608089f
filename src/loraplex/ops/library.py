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
    for device_type in ("cpu", "cuda"):
        _library.impl(name, _in_own_dtype(name, device_type), f"Autocast{device_type.upper()}")


def _in_own_dtype(name: str, device_type: str) -> Callable[..., object]:
    """The op under autocast: results keep the dtype of x, whatever torch would do inside."""

    def run(*arguments: object) -> object:
        with torch.autocast(device_type, enabled=False):
            return getattr(torch.ops.loraplex, name)(*arguments)

    return run
