"""Which adapter slot each token of a step uses, in buffers that captured CUDA graphs read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from loraplex.routing import MAX_TILE_M, Routing, tile_height

SMALL_TILES = (16, 32, 64)
Slots: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"


class Route(NamedTuple):
    """What the routed ops read for a number of rows: int32 [M], int32 [M], int32 [tiles, ...]."""

    indices: Tensor
    places: Tensor
    plan: Tensor


class Step:
    """Slots of the tokens of one step, for every number of rows that a model may be run with.

    The engine pads a step to the size of a CUDA graph, and a graph reads fixed addresses. So there
    is one routing for each height of tiles, rows past the step's tokens are base rows in all of
    them, and the number of rows alone says which one a graph was captured with.

    Attributes:
        has_lora: whether any token uses an adapter; a host flag, also read at capture.
        impl: implementation that the layers ask for.
    """

    def __init__(
        self, max_tokens: int, num_adapters: int, device: torch.device, impl: str = "auto"
    ) -> None:
        self.impl = impl
        self.has_lora = False
        self.max_tokens = _whole_tiles(max_tokens)
        self._routings = {
            tile: Routing.allocate(rows, num_adapters=num_adapters, device=device)
            for tile, rows in [*((t, t) for t in SMALL_TILES), (MAX_TILE_M, self.max_tokens)]
        }
        # views of whole buffers; an update shortens only the routing's own
        self._buffers = {
            tile: Route(routing.indices, routing.places, routing.plan)
            for tile, routing in self._routings.items()
        }
        # by number of rows: a launch in a graph reads early what an earlier one has read, and every
        # layer of a step is given the same tensors
        self._views: dict[int, Route] = {}
        self._written = 0

    def set_(self, slots: Slots) -> None:
        """Use these slots, int [n], -1 = base only, from the next launch on; no synchronisation.

        Raises:
            ValueError: more tokens than ``max_tokens``.
        """
        count = len(slots)
        if count > self.max_tokens:
            raise ValueError(f"slots must have at most {self.max_tokens} tokens, got {count}")
        # rows that the previous step wrote past this one become base rows again
        rows = _whole_tiles(max(count, self._written))
        padded = np.full(rows, -1, dtype=np.int32)
        padded[:count] = slots
        indices = torch.from_numpy(padded)  # a copy would queue behind adapters that arrive
        for tile, routing in self._routings.items():
            if tile == MAX_TILE_M:
                routing.update_(indices)
            elif count <= tile:  # a step is never run with fewer rows than it has tokens
                routing.update_(indices[:tile])
        self._written = count
        self.has_lora = bool((padded >= 0).any())

    def route(self, rows: int) -> Route:
        """The buffers for a run with this many rows.

        Raises:
            ValueError: more rows than ``max_tokens``.
        """
        if rows > self.max_tokens:
            raise ValueError(f"a step has at most {self.max_tokens} rows, got {rows}")
        view = self._views.get(rows)
        if view is None:
            tile = tile_height(rows)
            indices, places, plan = self._buffers[tile]
            view = Route(indices[:rows], places[:rows], plan[: -(-rows // tile)])
            self._views[rows] = view
        return view

    def buffers(self) -> dict[str, Tensor]:
        """Every device tensor by name, for an engine that saves and restores its buffers."""
        return {
            f"{name}_{tile}": tensor
            for tile, route in self._buffers.items()
            for name, tensor in route._asdict().items()
        }


def slots_of(adapter_ids: Sequence[int], slot_of_id: Mapping[int, int]) -> Slots:
    """Slot of every token, int64 [n], from the engine's adapter ids; ids below 1 are base tokens.

    Raises:
        KeyError: an adapter that has no slot.
    """
    ids, where = np.unique(np.asarray(adapter_ids, dtype=np.int64), return_inverse=True)
    slots = np.array([slot_of_id[i] if i > 0 else -1 for i in ids.tolist()], dtype=np.int64)
    return slots[where.reshape(-1)]


def _whole_tiles(rows: int) -> int:
    return max(1, -(-rows // MAX_TILE_M)) * MAX_TILE_M
