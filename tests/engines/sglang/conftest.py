"""Stand-ins for what the backend meets in SGLang, with SGLang's memory layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from loraplex.engines.sglang.backend import make_backend


class UnquantizedLinearMethod:
    """Named like SGLang's, since the plugin goes by the name."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)


class DoublingMethod(UnquantizedLinearMethod):
    """A base layer that is not x @ weight.T, as quantised ones are not."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return 2 * super().apply(layer, x, bias)


class ColumnParallelLinearWithLoRA(torch.nn.Module):
    """A wrapped layer and its pools, A packed by live rank; NaN where nothing was written."""

    def __init__(
        self, in_features: int, slices: tuple[int, ...], slots: int, max_rank: int,
        dtype: torch.dtype, device: torch.device, *, bias: bool = False, extra: int = 0,
        method: type[UnquantizedLinearMethod] = UnquantizedLinearMethod,
    ) -> None:  # fmt: skip
        super().__init__()
        self.slices = slices
        width = sum(slices)
        make: dict[str, Any] = {"dtype": dtype, "device": device}
        self.base_layer = SimpleNamespace(
            weight=torch.randn(width + extra, in_features, **make) / in_features**0.5,
            bias=torch.randn(width + extra, **make) if bias else None,
            skip_bias_add=False,
            quant_method=method(),
        )
        nan = float("nan")
        self.lora_a = torch.full((slots, len(slices) * max_rank, in_features), nan, **make)
        self.lora_b = torch.full((slots, width, max_rank), nan, **make)
        self.offsets = tuple(sum(slices[:s]) for s in range(len(slices) + 1))
        self.adapters: dict[int, tuple[Tensor, Tensor]] = {}

    def load(self, slot: int, rank: int) -> None:
        """Write an adapter as SGLang does: [S*r, K] at the top of A, r columns of B."""
        like = self.lora_a
        a = torch.randn(len(self.slices) * rank, like.shape[2]).to(like) / like.shape[2] ** 0.5
        b = torch.randn(self.lora_b.shape[1], rank).to(like)
        self.lora_a[slot, : a.shape[0]] = a
        self.lora_b[slot, :, :rank] = b
        self.adapters[slot] = (a, b)
        notify = getattr(self, "on_lora_slots_updated", None)
        if callable(notify):
            notify({slot})

    def forward(self, backend: Any, x: Tensor, **kwargs: Any) -> Tensor:
        base = self.base_layer

        def base_fn() -> Tensor:
            return base.quant_method.apply(base, x, base.bias)

        output: Tensor = backend.forward_with_base(
            self, x, base_fn, self.lora_a, self.lora_b, None, self.offsets, **kwargs
        )
        return output

    def truth(
        self, x: Tensor, slots: list[int], scalings: list[float], dtype: torch.dtype
    ) -> Tensor:
        """The same in another dtype, adapter by adapter, with plain torch."""
        base = self.base_layer
        cast = SimpleNamespace(
            weight=base.weight.to(dtype), bias=None if base.bias is None else base.bias.to(dtype)
        )
        y = base.quant_method.apply(cast, x.to(dtype), cast.bias)
        for row, slot in enumerate(slots):
            if slot < 0:
                continue
            a, b = (t.to(dtype) for t in self.adapters[slot])
            v = (x[row].to(dtype) @ a.T).view(len(self.slices), -1)
            parts = [
                b[start:end] @ v[s]
                for s, (start, end) in enumerate(zip(self.offsets, self.offsets[1:], strict=False))
            ]
            y[row, : self.offsets[-1]] += scalings[slot] * torch.cat(parts)
        return y


class RowParallelLinearWithLoRA(ColumnParallelLinearWithLoRA):
    """Named like SGLang's; the plugin must not take it for its parent here."""


class Runner:
    """SGLang's ``DenseLoraRunner``, as far as slots of tokens go."""

    def __init__(self) -> None:
        self.all_slots = self.token_slots = torch.empty(0, dtype=torch.int32)

    def set_num_tokens(self, count: int) -> None:
        self.token_slots = self.all_slots[:count]


@dataclass
class Parent:
    """SGLang's ``TritonV2LoRABackend``: slots of tokens per step, and a path of its own."""

    max_loras_per_batch: int
    device: torch.device
    own_calls: list[Any] = field(default_factory=list)
    name = "triton_v2"

    def __post_init__(self) -> None:
        self.runner = Runner()
        # one buffer for all steps, as for a CUDA graph; a padded tail is base rows
        self.slots = torch.full((64,), -1, dtype=torch.int32, device=self.device)

    def prepare_lora_batch(
        self, forward_batch: Any, weight_indices: list[int], lora_ranks: list[int],
        scalings: list[float], use_decode_cuda_graph: bool, use_prefill_cuda_graph: bool = False,
    ) -> None:  # fmt: skip
        tokens = [
            slot if lora_ranks[slot] > 0 else -1
            for slot, length in zip(weight_indices, forward_batch.lengths, strict=True)
            for _ in range(length)
        ]
        self.slots.fill_(-1)
        self.slots[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.runner.all_slots = self.slots

    def reset_batch_state(self) -> None:
        self.runner = Runner()

    def reset_routing_cache(self) -> None:
        pass

    def forward_with_base(
        self, layer: Any, x: Tensor, base_fn: Callable[[], Tensor], *pools: Any, **kwargs: Any
    ) -> Tensor:
        self.own_calls.append(layer)
        return base_fn()


def begin(backend: Any, slots: list[int], ranks: list[int], scalings: list[float],
          lengths: list[int] | None = None) -> list[int]:  # fmt: skip
    """Start a step as SGLang does; only slots of the step have a rank in its lists.

    Returns:
        The slot of each row, -1 = base only.
    """
    lengths = lengths or [1] * len(slots)
    listed = [rank if slot in slots else 0 for slot, rank in enumerate(ranks)]
    backend.prepare_lora_batch(SimpleNamespace(lengths=lengths), slots, listed, scalings, False)
    return [
        slot if ranks[slot] else -1
        for slot, length in zip(slots, lengths, strict=True)
        for _ in range(length)
    ]


KINDS = {"column": ColumnParallelLinearWithLoRA, "row": RowParallelLinearWithLoRA}
METHODS = {"plain": UnquantizedLinearMethod, "doubling": DoublingMethod}


@pytest.fixture
def sgl(device: torch.device) -> SimpleNamespace:
    """``backend(slots, impl)``, ``layer(...)`` and ``begin(...)`` on the device of the run."""

    def backend(slots: int, impl: str = "auto", max_tokens: int = 0) -> Any:
        made = make_backend(Parent, lambda kind: kind is None, lambda: max_tokens)
        created = made(slots, device)
        created.dense.impl = impl
        return created

    def layer(
        slots: int, slices: tuple[int, ...] = (48,), in_features: int = 64, max_rank: int = 16,
        dtype: torch.dtype = torch.float32, kind: str = "column", method: str = "plain",
        bias: bool = False, extra: int = 0,
    ) -> ColumnParallelLinearWithLoRA:  # fmt: skip
        return KINDS[kind](
            in_features, slices, slots, max_rank, dtype, device,
            bias=bias, extra=extra, method=METHODS[method],
        )  # fmt: skip

    return SimpleNamespace(backend=backend, layer=layer, begin=begin)
