"""Every kind of layer runs once before the engine starts: kernels compile, the base is right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from loraplex.engines.vllm.op import AdoptedLayer
from loraplex.errors import LoraplexError

CHECK_ROWS = 8
# up to here the engine captures CUDA graphs, for which it runs every size itself
FIRST_LONG = 1024
# kernels are compiled apart for numbers of rows that are multiples of 16 and for others
OTHER = 3


def rehearse(layers: dict[str, AdoptedLayer], modules: dict[str, Any]) -> None:
    """Run the layers of each shape with empty slots, on few rows and on many.

    Args:
        layers: adopted layers by module name; modules: vLLM's layers by the same names.

    Raises:
        LoraplexError: a layer without adapters gives something else than its base layer.
        RuntimeError and others: a kernel cannot be compiled or run here.
    """
    seen: set[tuple[Any, ...]] = set()
    for name, layer in layers.items():
        weight = _plain_weight(layer, modules[name])
        bias = None if weight is None else modules[name].base_layer.bias
        table = layer.slots.table
        kind = (table.in_features, table.slices, weight is None, bias is None)
        if kind in seen:
            continue
        seen.add(kind)
        for rows in _sizes(layer.step.max_tokens):
            # slot 0 of every token, which is empty
            layer.step.set_(np.zeros(rows, dtype=np.int64))
            x = torch.randn(rows, table.in_features, dtype=table.dtype, device=table.device)
            _run(name, layer, x, weight, bias)
        layer.step.set_(np.zeros(0, dtype=np.int64))


def _plain_weight(layer: AdoptedLayer, module: Any) -> Tensor | None:
    """The weight that a fused layer multiplies with; None where the base output comes first."""
    return module.base_layer.weight if layer.is_fused else None


def _run(
    name: str, layer: AdoptedLayer, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    if weight is None:
        wanted = x.new_ones(x.shape[0], layer.slots.table.out_features)
        found = wanted.clone()
        layer.add_(found, x)
    elif x.shape[0] <= CHECK_ROWS:
        wanted, found = F.linear(x, weight, bias), layer.linear(x, weight, bias)
    else:
        layer.linear(x, weight, bias)
        return
    # weights that are not there yet may hold anything
    is_known = bool(torch.isfinite(wanted).all())
    limit = 4 * torch.finfo(x.dtype).eps * wanted.abs().max()
    if is_known and not (found - wanted).abs().max() <= limit:
        raise LoraplexError(f"{name} without adapters must be its base layer, and is not")


def _sizes(max_tokens: int) -> Iterator[int]:
    yield CHECK_ROWS
    sizes = sorted({min(FIRST_LONG, max_tokens), max_tokens})
    for rows in sizes:
        yield from (rows, rows - OTHER)
