"""Two registered ops that vLLM's compiled graphs call, and the layers that they speak of.

A compiled graph holds tensors, not objects, and may come from a cache that another process wrote.
So a layer goes into it as a number in host memory, read when the op runs: the same way as vLLM's
own flags, and right for several engines in one process.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor
from torch.nn import functional as F

from loraplex.engines.vllm.slots import LayerSlots
from loraplex.engines.vllm.step import Step

# these modules define loraplex::lora_linear and loraplex::add_lora_, which the ops here call
from loraplex.ops import add_lora as _defines_add_lora  # noqa: F401
from loraplex.ops import lora_linear as _defines_lora_linear  # noqa: F401
from loraplex.ops.library import register
from loraplex.ops.routed import layout_of

_numbers = itertools.count(1)
_layers: weakref.WeakValueDictionary[int, AdoptedLayer] = weakref.WeakValueDictionary()


class AdoptedLayer:
    """One layer's adapters and the step that says who uses them.

    Attributes:
        is_fused: whether the layer's GEMM is ours too.
        handle: int64 [1] in host memory, how a graph names this layer.
    """

    def __init__(self, slots: LayerSlots, step: Step, *, is_fused: bool) -> None:
        self.slots, self.step, self.is_fused = slots, step, is_fused
        table = slots.table
        self._table = (table.entries, table.storages)
        self._shape = (list(table.slices), layout_of(table))
        number = next(_numbers)
        self.handle = torch.tensor([number])
        _layers[number] = self

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Base GEMM and LoRA of x [M, K], [M, N]."""
        if not self.step.has_lora:
            return F.linear(x, weight, bias)
        y: Tensor = torch.ops.loraplex.lora_linear(
            x, weight, bias, *self._table, *self.step.route(x.shape[0]), *self._shape,
            self.step.impl,
        )  # fmt: skip
        return y

    def add_(self, y: Tensor, x: Tensor) -> None:
        """LoRA of x [M, K] onto a base output y [M, N]."""
        if self.step.has_lora:
            torch.ops.loraplex.add_lora_(
                y, x, None, *self._table, *self.step.route(x.shape[0]), *self._shape,
                self.step.impl,
            )  # fmt: skip


def _find(handle: Tensor) -> AdoptedLayer:
    return _layers[int(handle)]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor) -> Tensor:
    return _find(handle).linear(x, weight, bias)


def _add_(y: Tensor, x: Tensor, handle: Tensor) -> None:
    _find(handle).add_(y, x)


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None, handle: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _fake_add_(y: Tensor, x: Tensor, handle: Tensor) -> None:
    return None


register(
    "vllm_linear(Tensor x, Tensor weight, Tensor? bias, Tensor handle) -> Tensor",
    _linear,
    _fake_linear,
)
register("vllm_add_(Tensor(a!) y, Tensor x, Tensor handle) -> ()", _add_, _fake_add_)
