"""loraplex: many LoRA adapters from one base model, at the speed of the base model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from loraplex.errors import (
    AdapterError,
    AdapterExistsError,
    LoraplexError,
    PoolError,
    PoolFullError,
    UnknownAdapterError,
    UnsupportedAdapterError,
    UnsupportedImplError,
)
from loraplex.ops.add_lora import add_lora_
from loraplex.ops.explain import Explanation, explain
from loraplex.ops.lora_linear import lora_linear
from loraplex.ops.matmul import fused_matmul_expand, matmul
from loraplex.ops.multi_lora import multi_lora
from loraplex.routing import Routing
from loraplex.table import AdapterTable
from loraplex.version import __version__

if TYPE_CHECKING:
    from loraplex.adapters import Adapter, load_adapter
    from loraplex.nn.attach import attach, detach
    from loraplex.pool import AdapterPool

# rooms that most users of the ops alone never open
_LATER = {
    "Adapter": "adapters",
    "load_adapter": "adapters",
    "AdapterPool": "pool",
    "attach": "nn",
    "detach": "nn",
}

__all__ = [
    "Adapter",
    "AdapterError",
    "AdapterExistsError",
    "AdapterPool",
    "AdapterTable",
    "Explanation",
    "LoraplexError",
    "PoolError",
    "PoolFullError",
    "Routing",
    "UnknownAdapterError",
    "UnsupportedAdapterError",
    "UnsupportedImplError",
    "__version__",
    "add_lora_",
    "attach",
    "detach",
    "explain",
    "fused_matmul_expand",
    "load_adapter",
    "lora_linear",
    "matmul",
    "multi_lora",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"loraplex.{_LATER[name]}"), name)
    raise AttributeError(f"module 'loraplex' has no attribute {name!r}")
