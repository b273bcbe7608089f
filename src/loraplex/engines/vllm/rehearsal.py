"""Every kind of layer runs once before the engine starts: kernels compile, the base is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from loraplex.engines.vllm.op import AdoptedLayer
from loraplex.errors import LoraplexError
from loraplex.ops.sizes import sizes_to_compile

# every layer has a size of at most so many rows, the smallest height of a routing's tiles
CHECK_ROWS = 16


def rehearse(layers: dict[str, AdoptedLayer], modules: dict[str, Any]) -> None:
    """Run the layers of each shape with empty slots, on numbers of rows that compile all kernels.

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
        stride = None if weight is None else weight.stride()
        kind = (table.in_features, table.slices, table.rank_multiple, stride, bias is None)
        if kind in seen:
            continue
        seen.add(kind)
        for rows in _sizes(layer, weight):
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


def _sizes(layer: AdoptedLayer, weight: Tensor | None) -> list[int]:
    step, table = layer.step, layer.slots.table
    op = "add_lora" if weight is None else "lora_linear"
    x = torch.empty(1, table.in_features, dtype=table.dtype, device=table.device)
    return sizes_to_compile(op, x, table, step.max_tokens, weight, step.impl)
