"""What DoRA and trained biases come down to at serving time: one vector each, found once."""

from __future__ import annotations

import torch
from torch import Tensor

SCRATCH_ELEMENTS = 4 << 20


def column_scale(weight: Tensor, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor) -> Tensor:
    """DoRA's factor per output, computed in float32 on the device of the weight.

    Semantics::

        magnitude / (weight + scaling * b @ a).norm(dim=1)

    Args:
        weight: [width, K], the rows of the base weight that belong to the slice.
        a: [rank, K]; b: [width, rank]; magnitude: [width].

    Returns:
        float32 [width] in host memory. Rows are taken in blocks, so the scratch memory stays small.

    Example:
        >>> w, m = torch.eye(2) * 4, torch.tensor([2.0, 8.0])
        >>> column_scale(w, torch.zeros(1, 2), torch.zeros(2, 1), 1.0, m)
        tensor([0.5000, 2.0000])
    """
    width, in_features = weight.shape
    device = weight.device
    a32 = a.to(device=device, dtype=torch.float32)
    b32 = b.to(device=device, dtype=torch.float32)
    norm = torch.empty(width, dtype=torch.float32, device=device)
    rows = max(1, SCRATCH_ELEMENTS // max(1, in_features))
    for start in range(0, width, rows):
        block = slice(start, start + rows)
        # Out of place: a float32 weight is its own .float(), and it belongs to the model.
        merged = torch.addmm(weight[block].float(), b32[block], a32, alpha=scaling)
        norm[block] = torch.linalg.vector_norm(merged, dim=1)
    return magnitude.to(torch.float32).cpu() / norm.cpu()


def adapter_bias(
    lora_bias: Tensor | None,
    scaling: float,
    scale: Tensor | None,
    trained_bias: Tensor | None,
    layer_bias: Tensor | None,
) -> Tensor | None:
    """What an adapter adds to the layer's bias: float32 [width] in host memory, None if nothing.

    Semantics::

        scale * scaling * lora_bias + (trained_bias - layer_bias)

    Args:
        lora_bias: bias of B, applied before the scaling.
        scale: DoRA's factor, None for ones; it does not touch the layer's bias.
        trained_bias: a bias that replaces the layer's own.
        layer_bias: the layer's own bias, None if it has none; used only with ``trained_bias``.
    """
    parts = []
    if lora_bias is not None:
        part = lora_bias.to(torch.float32).cpu() * scaling
        parts.append(part if scale is None else part * scale)
    if trained_bias is not None:
        parts.append(trained_bias.to(torch.float32).cpu())
        if layer_bias is not None:
            parts.append(-layer_bias.detach().to(torch.float32).cpu())
    return torch.stack(parts).sum(0) if parts else None
