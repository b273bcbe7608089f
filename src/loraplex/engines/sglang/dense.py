"""SGLang's linear layers with their adapters: fused where the weight is plain, else added."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from loraplex.engines.sglang.slots import Pools, SlotBook
from loraplex.engines.sglang.steps import StepRouting, is_capturing
from loraplex.ops.add_lora import add_lora_
from loraplex.ops.impls import resolve
from loraplex.ops.lora_linear import lora_linear
from loraplex.ops.routed import Layout, Routed, layout_of, problem_of
from loraplex.ops.sizes import sizes_to_compile
from loraplex.routing import Routing
from loraplex.table import AdapterTable

# Layers whose base_fn adds `base_layer.bias`, unless the model wants to add it later itself.
BIAS_LAYERS = ("ColumnParallelLinearWithLoRA", "ReplicatedLinearWithLoRA")
ROW_LAYER = "RowParallelLinearWithLoRA"
PLAIN_METHOD = "UnquantizedLinearMethod"
# Implementations of lora_linear in which the base GEMM is torch's; SGLang has its own for those.
BASE_APART = ("torch", "gemm_add")


@dataclass
class Layer:
    """What is known of one wrapped layer after its first step."""

    pools: Pools
    table: AdapterTable
    is_fused: dict[int, bool] = field(default_factory=dict)


class DenseLora:
    """The linear layers of one model, over SGLang's own pools.

    Args:
        num_slots: SGLang's ``max_loras_per_batch``.
        device: where model and pools are.
        impl: implementation of :func:`loraplex.lora_linear`; ``"auto"`` asks the tuning tables.
        max_tokens: rows up to which kernels are compiled when a kind of layer is first run.
    """

    def __init__(
        self, num_slots: int, device: torch.device, impl: str = "auto", max_tokens: int = 0
    ) -> None:
        # tensors on `cuda` say `cuda:0`, and so must whatever is compared with them
        self.device = torch.empty(0, device=device).device
        self.book = SlotBook(num_slots, self.device)
        self.steps = StepRouting(num_slots, self.device)
        self.impl = impl
        self.max_tokens = max_tokens
        self._layers: dict[Any, Layer] = {}
        self._rehearsed: set[tuple[Any, ...]] = set()

    def begin(self, slots: Sequence[int], ranks: Sequence[int], scalings: Sequence[float]) -> None:
        """Start a step whose requests use these slots; ranks and scalings are those of all."""
        self.steps.begin()
        self.book.update(set(slots), ranks, scalings)

    def layer_for(
        self, module: Any, x: Tensor, a: Tensor, b: Tensor, offsets: Sequence[int]
    ) -> Layer | None:
        """The layer behind a wrapped module, or None where SGLang's own path has to run.

        Args:
            module: SGLang's wrapper, with the ``base_layer`` inside.
            x: [M, K]; a: pool [L, S*R_max, K]; b: pool [L, N, R_max].
            offsets: where the S slices begin in the output, N last.
        """
        known = self._layers.get(module)
        if known is not None and known.pools.a is a and known.pools.b is b:
            return known if x.dim() == 2 and x.dtype == a.dtype else None
        slices = tuple(end - start for start, end in itertools.pairwise(offsets))
        # tables are made before graphs are: constants cannot be uploaded into a capture
        if not self._is_regular(x, a, b, slices) or is_capturing(self.device):
            return None
        if known is not None:
            self.book.remove(known.pools)
        pools = Pools(a, b, slices)
        layer = Layer(pools, self.book.add(pools))
        self._layers[module] = layer
        module.on_lora_slots_updated = self.book.renew
        self._rehearse(module, layer, x)
        return layer

    def forward(
        self,
        module: Any,
        layer: Layer,
        x: Tensor,
        token_slots: Tensor,
        base_fn: Callable[[], Tensor],
    ) -> Tensor:
        """Base layer and adapters of every row; the caller reduces over ranks, once.

        Args:
            x: [M, K]; token_slots: int32 [M], -1 = base only.
            base_fn: what SGLang computes without adapters, [M, N or more].
        """
        return self._run(module, layer, x, self.steps.get(token_slots), base_fn)

    def _run(
        self, module: Any, layer: Layer, x: Tensor, routing: Routing, base_fn: Callable[[], Tensor]
    ) -> Tensor:
        count = x.shape[0]
        if count not in layer.is_fused:
            layer.is_fused[count] = self._is_fused(module, layer.table, x, routing)
        if layer.is_fused[count]:
            base = module.base_layer
            bias = None if base.bias is None or base.skip_bias_add else base.bias
            return lora_linear(x, base.weight, layer.table, routing, bias, impl=self.impl)
        output = base_fn()
        part = output[:, : layer.table.out_features]
        add_lora_(part, x, layer.table, routing, impl=self._add_impl)
        return output

    @property
    def _add_impl(self) -> str:
        return "triton" if self.impl in ("fused", "gemm_add") else self.impl

    def _rehearse(self, module: Any, layer: Layer, x: Tensor) -> None:
        """Run a layer of a new kind on base rows, on numbers of rows that compile all its kernels.

        SGLang runs every layer before it captures graphs, but only with the sizes of graphs; the
        first prefill outside of them would wait for the compiler.
        """
        table = layer.table
        weight = module.base_layer.weight if has_plain_weight(module, table, x) else None
        kind = (
            table.in_features, table.slices, table.dtype, table.rank_multiple,
            None if weight is None else (weight.stride(), module.base_layer.bias is None),
        )  # fmt: skip
        if kind in self._rehearsed:
            return
        self._rehearsed.add(kind)
        sizes = set(sizes_to_compile("add_lora", x, table, self.max_tokens, impl=self._add_impl))
        if weight is not None:
            sizes |= set(
                sizes_to_compile("lora_linear", x, table, self.max_tokens, weight, self.impl)
            )
        for rows in sorted(sizes):
            sample = x.new_zeros(rows, table.in_features)
            slots = torch.full((rows,), -1, dtype=torch.int32, device=x.device)
            routing = Routing.from_indices(slots, num_adapters=self.book.num_slots)
            base_fn = functools.partial(x.new_zeros, (rows, table.out_features))
            self._run(module, layer, sample, routing, base_fn)

    def _is_regular(self, x: Tensor, a: Tensor, b: Tensor, slices: tuple[int, ...]) -> bool:
        """Whether pools and input have the layout that a table describes."""
        return (
            x.dim() == 2
            and a.dim() == b.dim() == 3
            and x.dtype == a.dtype == b.dtype
            and a.device == b.device == self.device
            and a.shape[0] == b.shape[0] == self.book.num_slots
            and a.shape[1] == len(slices) * b.shape[2]
            and a.shape[2] == x.shape[1]
            and all(width > 0 for width in slices)
            and sum(slices) == b.shape[1]
            and b.shape[2] > 0
            and a.is_contiguous()
            and b.is_contiguous()
        )

    def _is_fused(self, module: Any, table: AdapterTable, x: Tensor, routing: Routing) -> bool:
        """Whether our GEMM takes the place of SGLang's for this many rows."""
        if not has_plain_weight(module, table, x):
            return False
        routed = Routed(
            table.entries, table.storages, routing.indices, routing.places, routing.plan,
            table.slices, Layout(*layout_of(table)),
        )  # fmt: skip
        problem = problem_of("lora_linear", x, routed, module.base_layer.weight)
        return resolve(problem, self.impl, x.device).impl not in BASE_APART


def has_plain_weight(module: Any, table: AdapterTable, x: Tensor) -> bool:
    """Whether base_fn of this module is x @ weight.T and a bias that we know, and no more."""
    base = module.base_layer
    kinds = {kind.__name__ for kind in type(module).__mro__}
    bias = getattr(base, "bias", None)
    # in a row-parallel layer only the first rank adds the bias: left to SGLang
    is_known = bias is None if ROW_LAYER in kinds else bool(kinds.intersection(BIAS_LAYERS))
    if not is_known:
        return False
    weight = getattr(base, "weight", None)
    return (
        type(getattr(base, "quant_method", None)).__name__ == PLAIN_METHOD
        and not getattr(base, "use_intel_amx_backend", False)
        and hasattr(base, "bias")
        and hasattr(base, "skip_bias_add")
        and isinstance(weight, Tensor)
        and weight.shape == (table.out_features, table.in_features)
        and weight.dtype == x.dtype
        and weight.device == x.device
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    )
