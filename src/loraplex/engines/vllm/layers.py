"""What an adopted layer does differently: subclasses of vLLM's own.

A layer is adopted by giving the object a subclass of its class, made here, so vLLM's classes stay
as they are, and each layer is decided by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from loraplex.engines.vllm.op import AdoptedLayer

Maker = Callable[[Any], Any]


def with_slots(own: Any) -> Any:
    """A linear layer whose table follows what vLLM copies into its slots."""

    class HasSlots(own):  # type: ignore[misc]
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

    return HasSlots


def fused(own: Any) -> Any:
    """An unquantised layer: its GEMM and the adapters are one op."""

    class Fused(with_slots(own)):  # type: ignore[misc]
        def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            """Output of x [..., K] with the given bias, as vLLM's own ``apply``."""
            rows = x if x.ndim == 2 else x.flatten(0, -2)
            y: Tensor = torch.ops.loraplex.vllm_linear(
                rows, self.base_layer.weight, bias, self._loraplex_handle
            )
            return y if x.ndim == 2 else y.reshape(*x.shape[:-1], y.shape[-1])

    return Fused


def added(own: Any) -> Any:
    """A layer whose base output comes from somewhere else: the adapters are added to it."""

    class Added(with_slots(own)):  # type: ignore[misc]
        def _apply_lora_to_output(self, x: Tensor, output: Tensor) -> Tensor:
            rows = x if x.ndim == 2 else x.flatten(0, -2)
            y = output if output.ndim == 2 else output.flatten(0, -2)
            torch.ops.loraplex.vllm_add_(y, rows, self._loraplex_handle)
            return y if output.ndim == 2 else y.reshape(output.shape)

    return Added


def watched(own: Any) -> Any:
    """A layer that keeps vLLM's own path, and says which slots hold weights for it."""

    class Watched(own):  # type: ignore[misc]
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

    return Watched


_made: dict[tuple[Maker, Any], Any] = {}


def change_class(one: Any, maker: Maker) -> Any:
    """Give an object the class that ``maker`` makes of its own, and return its old one."""
    old = type(one)
    if (maker, old) not in _made:
        _made[maker, old] = maker(old)
        _made[maker, old].__name__ = old.__name__  # vLLM tells some of its layers by name
    one.__class__ = _made[maker, old]
    return old


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
