"""The tensors of a case: known values, and NaN in everything that no result may depend on."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from loraplex.ops.add_lora import add_lora_
from loraplex.ops.lora_linear import lora_linear
from loraplex.ops.multi_lora import multi_lora
from loraplex.reference.unpack import SliceLora
from loraplex.routing import Routing
from loraplex.table import AdapterTable
from loraplex.testing.case import Case
from loraplex.testing.memory import is_surrounding_untouched, lay_out


@dataclass(frozen=True)
class Inputs:
    """Tensors of one case. ``adapters`` are the exact values behind the table, for the oracles."""

    case: Case
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    y: Tensor
    table: AdapterTable
    routing: Routing
    indices: Tensor
    adapters: dict[int, list[SliceLora]]
    pools: tuple[Tensor, Tensor, Tensor, Tensor]

    def run(self, op: str, impl: str) -> Tensor:
        """The result of one op; ``add_lora`` writes a copy of ``y`` that is laid out like it."""
        if op == "lora_linear":
            return lora_linear(self.x, self.weight, self.table, self.routing, self.bias, impl)
        if op == "multi_lora":
            a, b, scaling, ranks = self.pools
            return multi_lora(
                self.x, a, b, self.indices, scaling, ranks, slices=self.case.slices, impl=impl
            )
        y = lay_out(self.y, self.case.y)
        result = add_lora_(y, self.x, self.table, self.routing, self.bias, impl)
        assert result is y, "add_lora_ returns y itself"
        assert is_surrounding_untouched(y), "memory around y was written"
        return result


def build(case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Inputs:
    """Tensors of a case: reproducible values, NaN in everything that no result may depend on."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()) + seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=generator, device=device)

    n = sum(case.slices)
    indices = case.row_slots()
    x = normal(case.m, case.k).to(dtype)
    x = x[:1].expand(case.m, case.k) if case.x == "expanded" else lay_out(x, case.x)
    weight = normal(n, case.k, scale=case.k**-0.5).to(dtype)
    adapters = {
        slot: [
            SliceLora(
                a=normal(rank, case.k, scale=case.k**-0.5).to(dtype),
                b=normal(width, rank, scale=max(rank, 1) ** -0.5).to(dtype),
                scaling=0.5 + slot % 5 / 2,
                column_scale=1 + 0.2 * normal(width) if case.has_column_scale else None,
                bias=normal(width) if case.has_adapter_bias else None,
            )
            for rank, width in zip(ranks, case.slices, strict=True)
        ]
        for slot, ranks in enumerate(case.slot_ranks())
        if slot in indices
    }
    pools = fill_pools(case, adapters, dtype, device)
    table = table_by_set(case, adapters, dtype, device) if case.table == "set" else None
    given = index_tensor(case, indices, device)
    return Inputs(
        case=case,
        x=x,
        weight=lay_out(weight, case.weight),
        bias=normal(n).to(dtype) if case.has_bias else None,
        y=normal(case.m, n).to(dtype),
        table=table or table_over_pools(case, adapters, pools),
        routing=route(case, given, device),
        indices=given,
        adapters=adapters,
        pools=pools,
    )


def index_tensor(case: Case, indices: Sequence[int], device: torch.device) -> Tensor:
    """The rows' slots in the dtype, place and layout of the case."""
    where = torch.device("cpu") if case.index_layout == "host" else device
    tensor = torch.tensor(indices, dtype=case.index_dtype, device=where)
    return tensor.repeat_interleave(3)[1::3] if case.index_layout == "strided" else tensor


def route(case: Case, indices: Tensor, device: torch.device) -> Routing:
    """Routing of exactly these rows, or one with room to spare that held other rows before."""
    count = len(case.ranks)
    if not case.max_tokens:
        return Routing.from_indices(indices, num_adapters=count, device=device)
    routing = Routing.allocate(case.max_tokens, num_adapters=count, device=device)
    routing.update_([row % count for row in range(case.max_tokens)])
    return routing.update_(indices)


def fill_pools(
    case: Case, adapters: dict[int, list[SliceLora]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dense pools, scaling and ranks; NaN past each rank and in every slot that no row uses."""
    slots, capacity, n = len(case.ranks), case.capacity, sum(case.slices)
    nan = float("nan")
    a_pool = torch.full((slots, len(case.slices) * capacity, case.k), nan, dtype=dtype)
    b_pool = torch.full((slots, n, capacity), nan, dtype=dtype)
    a_pool, b_pool = a_pool.to(device), b_pool.to(device)
    scaling = torch.full((slots,), nan)
    for slot, parts in adapters.items():
        scaling[slot] = parts[0].scaling
        starts = accumulate(case.slices, initial=0)
        for s, (part, start) in enumerate(zip(parts, starts, strict=False)):
            rank, width = part.a.shape[0], part.b.shape[0]
            a_pool[slot, s * capacity : s * capacity + rank] = part.a
            b_pool[slot, start : start + width, :rank] = part.b
    ranks = torch.tensor([slot[0] for slot in case.slot_ranks()], dtype=torch.int32)
    return lay_out(a_pool, case.pools), lay_out(b_pool, case.pools), scaling, ranks


def table_over_pools(
    case: Case, adapters: dict[int, list[SliceLora]], pools: tuple[Tensor, Tensor, Tensor, Tensor]
) -> AdapterTable:
    """``AdapterTable.from_pools``."""
    a_pool, b_pool, scaling, ranks = pools
    shape = (len(case.ranks), sum(case.slices))
    extras = {}
    for name in ("column_scale", "bias"):
        rows = torch.full(shape, float("nan"), device=a_pool.device)
        for slot, parts in adapters.items():
            vectors = [getattr(part, name) for part in parts]
            if vectors[0] is not None:
                rows[slot] = torch.cat(vectors)
        extras[name] = lay_out(rows, "odd")
    return AdapterTable.from_pools(
        a_pool,
        b_pool,
        slices=case.slices,
        scaling=scaling,
        ranks=ranks,
        column_scale=extras["column_scale"] if case.has_column_scale else None,
        bias=extras["bias"] if case.has_adapter_bias else None,
        rank_multiple=case.rank_multiple,
    )


def table_by_set(
    case: Case, adapters: dict[int, list[SliceLora]], dtype: torch.dtype, device: torch.device
) -> AdapterTable:
    """``AdapterTable.allocate`` and ``set_``; slots without adapter had one that was cleared."""
    table = AdapterTable.allocate(
        len(case.ranks),
        case.k,
        case.slices,
        max_rank=case.capacity,
        dtype=dtype,
        device=device,
        has_column_scale=case.has_column_scale,
        has_bias=case.has_adapter_bias,
        rank_multiple=case.rank_multiple or 1,
    )
    for slot in range(len(case.ranks)):
        table.set_(
            slot,
            [
                torch.full((8, case.k), float("nan"), dtype=dtype, device=device)
                for _ in case.slices
            ],
            [torch.full((w, 8), float("nan"), dtype=dtype, device=device) for w in case.slices],
        )
        table.clear_(slot)
    for slot, parts in adapters.items():
        table.set_(
            slot,
            [lay_out(part.a, "wide") if part.a.shape[0] else None for part in parts],
            [lay_out(part.b, "wide") if part.a.shape[0] else None for part in parts],
            [part.scaling for part in parts],
            [part.column_scale for part in parts],
            [part.bias for part in parts],
        )
    return table
