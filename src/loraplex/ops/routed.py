"""What the routed ops share: checks of a call, contents of a table, the two LoRA products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from loraplex.checks import (
    check_device,
    check_dtype,
    check_same,
    check_shape,
    check_tensor,
    dtype_name,
)
from loraplex.ops.impls import arch_of, has_aligned_rows, has_dependent_launch, precision_of
from loraplex.reference.routing import item_height, tile_height_of
from loraplex.reference.unpack import SliceLora, unpack_slot
from loraplex.routing import Routing
from loraplex.table import AdapterTable
from loraplex.tuning import Problem
from loraplex.tuning.choose import Config


class Layout(NamedTuple):
    """The part of a table that is fixed for its life, as the list of ints that an op takes."""

    max_rank: int
    rank_multiple: int
    a_inner_stride: int
    b_inner_stride: int
    has_column_scale: int
    has_bias: int


def layout_of(table: AdapterTable) -> list[int]:
    """The ints that :class:`Layout` is made from.

    A table without ranks that has column scales or biases is one whose ranks are all zero.
    """
    has_more = table.has_column_scale or table.has_bias
    return [
        table.max_rank or (8 if has_more else 0), table.rank_multiple,
        table.a_inner_stride, table.b_inner_stride,
        int(table.has_column_scale), int(table.has_bias),
    ]  # fmt: skip


@dataclass
class Routed:
    """Table and routing of one call, unpacked from an op's arguments.

    Attributes:
        has_adapters: whether any row could have an adapter at all.
        tile_m, item_m: rows of a routing tile and of a work item.
        num_places: power of two that holds a tile's distinct adapters.
        num_items: most work items of a tile; one group more than adapters, for the base rows.
    """

    entries: Tensor
    storages: Sequence[Tensor]
    indices: Tensor
    places: Tensor
    plan: Tensor
    slices: tuple[int, ...]
    layout: Layout

    def __post_init__(self) -> None:
        num_adapters = self.entries.shape[0]
        self.has_adapters = num_adapters > 0 and self.layout.max_rank > 0
        self.tile_m = tile_height_of(self.plan)
        self.item_m = item_height(self.tile_m)
        self.num_places = max(2, 1 << (min(self.tile_m, num_adapters) - 1).bit_length())
        self.num_items = min(self.tile_m, self.tile_m // self.item_m + num_adapters + 1)

    def adapters(self, in_features: int, dtype: torch.dtype) -> dict[int, list[SliceLora]]:
        """Tensors of the adapters that occur, for the reference; reads the indices."""
        occurring = [int(slot) for slot in torch.unique(self.indices).tolist() if slot >= 0]
        inner = (self.layout.a_inner_stride, self.layout.b_inner_stride)
        return {
            slot: unpack_slot(
                self.entries[slot].tolist(), self.storages, in_features, self.slices, dtype, inner
            )
            for slot in occurring
        }


def check_routed(x: object, table: object, routing: object) -> None:
    """Require that x, table and routing fit each other.

    Raises:
        TypeError, ValueError: naming the argument, the rule and the value.
    """
    if not isinstance(table, AdapterTable):
        raise TypeError(f"table must be an AdapterTable, got {type(table).__name__}")
    if not isinstance(routing, Routing):
        raise TypeError(f"routing must be a Routing, got {type(routing).__name__}")
    x = check_tensor("x", x)
    if (
        x.dtype == table.dtype
        and x.shape == (routing.num_tokens, table.in_features)
        and x.device == table.device == routing.device
        and x.layout is torch.strided
        and routing.num_adapters <= table.num_adapters
    ):
        return
    check_shape("x", x, ["M", table.in_features])
    check_dtype("x", x, (table.dtype,))
    check_device("x", x, "table", table.device)
    check_device("routing.indices", routing.indices, "table", table.device)
    if routing.num_tokens != x.shape[0]:
        raise ValueError(
            f"routing must have one index per row of x ({x.shape[0]}), got {routing.num_tokens}"
        )
    raise ValueError(
        f"routing.num_adapters must be at most the table's {table.num_adapters}, "
        f"got {routing.num_adapters}"
    )


def check_weight(weight: object, x: Tensor, table: AdapterTable) -> None:
    """Require a weight [N, K] of the table's layer, like x."""
    weight = check_tensor("weight", weight)
    shape = (table.out_features, table.in_features)
    if weight.shape != shape or weight.dtype != x.dtype or weight.device != x.device:
        check_shape("weight", weight, shape)
        check_same("weight", weight, "x", x)


def check_bias(bias: Tensor | None, x: Tensor, out_features: int) -> None:
    """Require a layer bias [N] like x, or None."""
    if bias is not None:
        check_shape("bias", check_tensor("bias", bias), [out_features])
        check_same("bias", bias, "x", x)
        if bias.stride(0) != 1 and out_features > 1:
            raise ValueError(f"bias must be contiguous, got strides {bias.stride()}")


def problem_of(op: str, x: Tensor, routed: Routed, weight: Tensor | None = None) -> Problem:
    """What the choice for one call may depend on."""
    return problem_on(op, x, routed.slices, routed.entries.shape[0], routed.layout, weight)


def problem_on(
    op: str,
    x: Tensor,
    slices: tuple[int, ...],
    num_adapters: int,
    layout: Layout,
    weight: Tensor | None = None,
) -> Problem:
    """The same without a routing: the choice depends on x and on what a table can hold."""
    return Problem(
        op,
        m=x.shape[0],
        k=x.shape[1],
        slices=slices,
        num_adapters=num_adapters,
        max_rank=layout.max_rank,
        dtype=dtype_name(x.dtype),
        arch=arch_of(x.device),
        is_vectorizable=(
            layout.rank_multiple == 8
            and has_aligned_rows(x)
            and (weight is None or has_aligned_rows(weight))
        ),
    )


def shrink_rows_of(config: Config, ranks: int) -> int:
    """Ranks that one program of the shrink takes: no more than there are, but a dot's least 16."""
    return min(config["block_r"], max(16, 1 << (ranks - 1).bit_length()))


def room_for_shrink(
    x: Tensor, routed: Routed, config: Config, block_r: int
) -> tuple[Tensor, Tensor]:
    """Unwritten v [SPLIT_K, M, S, R] and groups [T, S, G, 4] (:mod:`loraplex.kernels.tile`)."""
    num_slices = len(routed.slices)
    groups_per_rank = -(-routed.layout.max_rank // 8)
    most_groups = min(routed.tile_m, routed.entries.shape[0]) * groups_per_rank + block_r // 8
    split_k = config["split_k"]
    # one plane is what the consumer multiplies with; several are summed in float32 before
    v = torch.empty(
        (split_k, x.shape[0], num_slices, groups_per_rank * 8),
        dtype=x.dtype if split_k == 1 else torch.float32,
        device=x.device,
    )
    groups = torch.empty(
        (routed.plan.shape[0], num_slices, most_groups, 4), dtype=torch.int64, device=x.device
    )
    return v, groups


def run_shrink(
    x: Tensor, routed: Routed, config: Config, block_r: int, arrivals: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """scaling * x A^T of every token's own adapter, and where the adapters' B are.

    Args:
        block_r: columns that the consumer takes at a time.
        arrivals: counters of the consumer, set to zero on the way.

    Returns:
        v [SPLIT_K, M, S, R] and groups [T, S, G, 4] (:mod:`loraplex.kernels.tile`).
    """
    from loraplex.kernels.shrink import launch_shrink
    from loraplex.kernels.shrink_wide import launch_shrink_wide

    max_rank = routed.layout.max_rank
    v, groups = room_for_shrink(x, routed, config, block_r)
    if config.get("is_wide"):
        columns = v.shape[2] * v.shape[3]
        launch = partial(launch_shrink_wide, block_r=shrink_rows_of(config, columns))
    else:
        launch = partial(
            launch_shrink,
            max_rank=max_rank,
            block_r=shrink_rows_of(config, max_rank),
            lanes=config["lanes"],
        )
    launch(
        x,
        routed.entries,
        routed.layout.a_inner_stride,
        routed.layout.b_inner_stride,
        routed.plan,
        v,
        groups,
        routed.plan[0, :0] if arrivals is None else arrivals,
        tile_m=routed.tile_m,
        item_m=routed.item_m,
        num_items=routed.num_items,
        num_places=routed.num_places,
        rank_multiple=routed.layout.rank_multiple,
        fill=block_r // 8,
        precision=precision_of(x),
        is_dependent=has_dependent_launch(x.device),
        block_k=config["block_k"],
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
    return v, groups


def run_expand(
    y: Tensor, x: Tensor, bias: Tensor | None, routed: Routed, configs: Mapping[str, Config]
) -> None:
    """Shrink, then one expand pass over ``y``."""
    from loraplex.kernels.expand import launch_expand

    config = configs["expand"]
    v, groups = run_shrink(x, routed, configs["shrink"], config["block_r"])
    launch_expand(
        y,
        bias,
        routed.entries,
        routed.layout.b_inner_stride,
        v,
        groups,
        routed.indices,
        routed.places,
        routed.plan,
        slices=routed.slices,
        rank_multiple=routed.layout.rank_multiple,
        has_column_scale=bool(routed.layout.has_column_scale),
        has_adapter_bias=bool(routed.layout.has_bias),
        tile_m=routed.tile_m,
        num_places=routed.num_places,
        precision=precision_of(x),
        is_dependent=has_dependent_launch(x.device),
        block_m=min(config["block_m"], routed.tile_m),
        block_n=config["block_n"],
        block_r=config["block_r"],
        lora_stages=config["lora_stages"],
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
