"""What an adopted layer does differently: classes that go in front of vLLM's own.

A layer is adopted by giving the object a class of the same name made of one of these and its old
class, so vLLM's classes stay as they are, and each layer is decided by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from loraplex.engines.vllm.op import AdoptedLayer

# what vLLM's class behind it in the method order is to mypy
Base: Any = object


class HasSlots(Base):  # type: ignore[misc]
    """A linear layer whose table follows what vLLM copies into its slots."""

    _loraplex: AdoptedLayer
    _loraplex_handle: Tensor

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Copy an adapter into a slot, then point the table at as many ranks as it has."""
        super().set_lora(index, lora_a, lora_b)
        self._loraplex.slots.point_(index, ranks_of(self, lora_a, lora_b))

    def reset_lora(self, index: int) -> None:
        """Clear a slot."""
        super().reset_lora(index)
        self._loraplex.slots.clear_(index)


class Fused(HasSlots):
    """An unquantised layer: its GEMM and the adapters are one op."""

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Output of x [..., K] with the given bias, as vLLM's own ``apply``."""
        rows = x if x.ndim == 2 else x.flatten(0, -2)
        y: Tensor = torch.ops.loraplex.vllm_linear(
            rows, self.base_layer.weight, bias, self._loraplex_handle
        )
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], y.shape[-1])


class Added(HasSlots):
    """A layer whose base output comes from somewhere else: the adapters are added to it."""

    def _apply_lora_to_output(self, x: Tensor, output: Tensor) -> Tensor:
        rows = x if x.ndim == 2 else x.flatten(0, -2)
        y = output if output.ndim == 2 else output.flatten(0, -2)
        torch.ops.loraplex.vllm_add_(y, rows, self._loraplex_handle)
        return y if output.ndim == 2 else y.reshape(output.shape)


class Watched(Base):  # type: ignore[misc]
    """A layer that keeps vLLM's own path, and says which slots hold weights for it."""

    _loraplex_used: set[int]
    _loraplex_forget: Callable[[], None]

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Copy an adapter into a slot."""
        super().set_lora(index, lora_a, lora_b)
        self._loraplex_used.add(index)
        self._loraplex_forget()

    def reset_lora(self, index: int) -> None:
        """Clear a slot."""
        super().reset_lora(index)
        if index in self._loraplex_used:
            self._loraplex_used.discard(index)
            self._loraplex_forget()


_combined: dict[tuple[Any, Any], Any] = {}


def combine(front: Any, own: Any) -> Any:
    """The class of an adopted object; it keeps the name of its own class."""
    if (front, own) not in _combined:
        content = {"__module__": __name__, "__doc__": front.__doc__}
        _combined[front, own] = type(own.__name__, (front, own), content)
    return _combined[front, own]


def ranks_of(layer: Any, lora_a: Any, lora_b: Any) -> list[int]:
    """Rank per slice of the adapter that ``set_lora`` was given; 0 = absent slice.

    Args:
        layer: the layer, of ``n_slices`` slices.
        lora_a: [rank, K] for all slices, or one (or None) per slice, or one per packed group.
        lora_b: [N, rank], or a sequence likewise.
    """
    count = layer.n_slices
    if isinstance(lora_a, Tensor):
        return [lora_a.shape[0]] * count
    if isinstance(lora_b, Sequence) and len(lora_b) != count:
        lora_a, lora_b = layer.expand_packed_lora(lora_a, lora_b)
    missing = isinstance(lora_b, Sequence)
    return [
        0 if a is None or (missing and lora_b[s] is None) else a.shape[0]
        for s, a in enumerate(lora_a)
    ]
