"""Ways to compute a LoRA layer that ``loraplex bench suite`` sets side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

import loraplex as lp
from loraplex.bench.layers_batch import (
    SCALING,
    Answer,
    Batch,
    Tensors,
    make_answer,
    parts_of,
    serial,
)

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Provider:
    """One way.

    Attributes:
        work: ``base``, ``whole`` (with adapters) or ``merged`` (one adapter in the weights).
        prepare: what does the work on one set of buffers; its own set-up is not timed.
        is_ours: its results must be right for the suite to succeed.
        about: a sentence for people who do not know it.
    """

    name: str
    work: str
    prepare: Callable[[Batch, Tensors], Call]
    about: str
    is_ours: bool = False
    is_interpreted: bool = False

    @property
    def floor_work(self) -> str:
        """Whose bytes and FLOPs are its floor; a merged layer moves what the base does."""
        return "base" if self.work == "merged" else self.work


def providers(*, is_gpu: bool) -> list[Provider]:
    """Everything but peers; without a GPU the kernels run in the interpreter."""
    impl = "auto" if is_gpu else "triton"
    own = not is_gpu
    found = [
        Provider(
            "base", "base", lambda b, t: lambda: F.linear(t.x, t.weight),
            "the base GEMM alone, by torch (cuBLAS on a GPU): no LoRA",
        ),
        Provider(
            "matmul", "base", lambda b, t: lambda: lp.matmul(t.x, t.weight.T, impl=impl),
            "the base GEMM alone, by loraplex.matmul: no LoRA", True, own,
        ),
        Provider(
            "merged", "merged", _merged,
            "one adapter merged into the weights: no LoRA work left, but one adapter for all",
        ),
        Provider(
            "lora_linear", "whole",
            lambda b, t: lambda: lp.lora_linear(t.x, t.weight, t.table, t.routing, impl=impl),
            "loraplex.lora_linear, as the tuning tables choose", True, own,
        ),
        Provider(
            "gemm_add", "whole",
            lambda b, t: lambda: lp.lora_linear(
                t.x, t.weight, t.table, t.routing, impl="gemm_add"
            ),
            "torch's base GEMM, then loraplex.add_lora_ (what quantised layers use)", True, own,
        ),
        Provider(
            "serial", "whole", lambda b, t: lambda: serial(b, t),
            "plain torch, one adapter after the other",
        ),
    ]  # fmt: skip
    if not is_gpu:
        found.append(
            Provider(
                "lora_linear_torch", "whole",
                lambda b, t: lambda: lp.lora_linear(t.x, t.weight, t.table, t.routing),
                "loraplex.lora_linear without a GPU: the torch reference", True,
            )
        )  # fmt: skip
    return found


def _merged(batch: Batch, tensors: Tensors) -> Call:
    weight = merge(batch, tensors)
    return lambda: F.linear(tensors.x, weight)


def merge(batch: Batch, tensors: Tensors) -> Tensor:
    """The weight with the adapter of the first token in it."""
    weight = tensors.weight.clone()
    for columns, a, b in parts_of(batch, tensors, next(iter(tensors.rows))):
        weight[columns] += SCALING * (b @ a)
    return weight


def merged_answer(batch: Batch, tensors: Tensors) -> Answer:
    """What a merged layer must give."""
    weight = merge(batch, tensors)
    truth = F.linear(tensors.x.double(), weight.double())
    return make_answer(batch, F.linear(tensors.x, weight), truth)
