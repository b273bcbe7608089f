"""The plan of each tile of rows: which adapters occur in it, and which rows each of them has.

A tile's plan is a row of int32 that every routed kernel reads, with T = rows of a tile:

| words | content |
| --- | --- |
| 0 | number of distinct adapters |
| 1 | number of items |
| 16 .. 16+T | slots of the distinct adapters, by first appearance (their *places*) |
| 16+T .. 16+2T | rows of the tile, grouped by place, base rows last |
| 16+2T .. 16+3T | items: rows of one place, ``start<<8 | size`` |
| 16+3T .. 16+4T | slot of each item's adapter, -1 for base rows |

An item is up to :func:`item_height` rows that share an adapter, what one program of the shrink
takes; base rows are the last group.
"""

from __future__ import annotations

import torch
from torch import Tensor

PLAN_HEADER = 16


def plan_width(tile_m: int) -> int:
    """Words in the plan of one tile."""
    return PLAN_HEADER + 4 * tile_m


def tile_height_of(plan: Tensor) -> int:
    """Rows of a tile, from the width of its plan."""
    return (plan.shape[1] - PLAN_HEADER) // 4


def item_height(tile_m: int) -> int:
    """Most rows of one adapter that one program takes."""
    return 16 if tile_m <= 64 else 64


def build_routing(source: Tensor, indices: Tensor, places: Tensor, plan: Tensor) -> None:
    """The buffers of :class:`loraplex.Routing` for ``source`` [M] in host memory."""
    indices.copy_(source)
    tile_m = tile_height_of(plan)
    for tile, start in enumerate(range(0, indices.shape[0], tile_m)):
        rows = indices[start : start + tile_m].tolist()
        slots = list(dict.fromkeys(slot for slot in rows if slot >= 0))
        place_of = {slot: place for place, slot in enumerate(slots)}
        places[start : start + tile_m] = torch.tensor([place_of.get(slot, -1) for slot in rows])
        groups: list[list[int]] = [[] for _ in range(len(slots) + 1)]
        for offset, slot in enumerate(rows):
            groups[place_of.get(slot, len(slots))].append(start + offset)
        items, owners = _items(groups, [*slots, -1], item_height(tile_m))
        order = [row for group in groups for row in group]
        for first, words in (
            (0, [len(slots), len(items)]),
            (PLAN_HEADER, slots),
            (PLAN_HEADER + tile_m, order),
            (PLAN_HEADER + 2 * tile_m, items),
            (PLAN_HEADER + 3 * tile_m, owners),
        ):
            plan[tile, first : first + len(words)] = torch.tensor(words, dtype=torch.int32)


def _items(groups: list[list[int]], slots: list[int], height: int) -> tuple[list[int], list[int]]:
    items, owners = [], []
    start = 0
    for slot, group in zip(slots, groups, strict=True):
        for first in range(0, len(group), height):
            items.append((start + first) << 8 | min(height, len(group) - first))
            owners.append(slot)
        start += len(group)
    return items, owners
