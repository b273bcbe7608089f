"""Which adapter each token of one step uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex import env
from loraplex.checks import (
    INDEX_DTYPES,
    check_dtype,
    check_index_range,
    check_int,
    check_shape,
    check_tensor,
    check_usable_device,
)
from loraplex.host_rows import rows_for
from loraplex.reference.routing import PLAN_HEADER, build_routing, item_height, plan_width
from loraplex.settled import forget

MAX_TILE_M = 128
MAX_INT32 = 2**31 - 1


def tile_height(num_tokens: int) -> int:
    """Rows per routing tile: the power of two from 16 to 128 that holds the tokens."""
    return min(MAX_TILE_M, max(16, 1 << max(0, num_tokens - 1).bit_length()))


class Routing:
    """The adapter index of every token of one step, and the distinct adapters of each tile of rows.

    Built once per step and shared by all layers. All buffers keep their addresses, so a CUDA graph
    captured with this object sees what later :meth:`update_` calls wrote.

    Attributes:
        indices: int32 [M], the slot of each token, -1 = base only.
        places: int32 [M], where a token's adapter stands in its tile's list, -1 = base only.
        plan: int32 [tiles, ...], what kernels read per tile of ``tile_m`` rows: the distinct
            adapters, the rows of each, and the work items (:mod:`loraplex.kernels.routing`).

    Example:
        >>> import torch, loraplex as lp
        >>> routing = lp.Routing.from_indices(torch.tensor([2, 0, -1, 2]), num_adapters=3)
        >>> routing.num_tokens, routing.indices.tolist(), routing.places.tolist()
        (4, [2, 0, -1, 2], [0, 1, -1, 0])
    """

    def __init__(self, max_tokens: int, num_adapters: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self.num_adapters = num_adapters
        self.device = device
        self.tile_m = tile_height(max_tokens)
        tiles = -(-max_tokens // self.tile_m)
        self._indices = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
        self._places = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
        self.plan = torch.zeros((tiles, plan_width(self.tile_m)), dtype=torch.int32, device=device)
        self._resize(max_tokens)

    @classmethod
    def allocate(
        cls, max_tokens: int, *, num_adapters: int, device: torch.device | str = "cuda"
    ) -> Routing:
        """Buffers for up to ``max_tokens`` tokens, all of them base rows until :meth:`update_`.

        Raises:
            ValueError, TypeError: a size is no whole number, negative or past int32, or there is
                no such device here.
        """
        check_int("max_tokens", max_tokens, 0, MAX_INT32)
        check_int("num_adapters", num_adapters, 0, MAX_INT32)
        return cls(max_tokens, num_adapters, check_usable_device("device", device))

    @classmethod
    def from_indices(
        cls,
        indices: Tensor | Sequence[int],
        *,
        num_adapters: int,
        device: torch.device | str | None = None,
    ) -> Routing:
        """Routing of exactly these tokens, on the device of ``indices`` unless another is named.

        Args:
            indices: int32 or int64 [M] (or a sequence of ints), the slot of each token, -1 = base.
            num_adapters: L, the number of slots.

        Raises:
            TypeError, ValueError: wrong dtype or shape; an index outside -1..L-1 (checked for
                indices in host memory, and on the GPU if ``LORAPLEX_DEBUG=1``).
        """
        indices = index_tensor(indices)
        check_dtype("indices", indices, INDEX_DTYPES)
        check_shape("indices", indices, ["M"])
        where = indices.device if device is None else device
        routing = cls.allocate(indices.shape[0], num_adapters=num_adapters, device=where)
        routing.update_(indices)
        return routing

    def update_(self, indices: Tensor | Sequence[int]) -> Routing:
        """Replace the tokens' adapters in place; the host does not wait for the device.

        Indices in host memory (a list, say) are read before this returns. A GPU then fetches them
        from pinned memory with the kernel that builds the routing: they do not queue behind copies
        that are on their way to the device, so this is the fastest way for a step of a server.
        Fewer than ``max_tokens`` indices make ``num_tokens`` smaller, with the same buffers.

        Raises:
            TypeError, ValueError: as :meth:`from_indices`, or more indices than ``max_tokens``;
                the routing is unchanged then.
        """
        indices = index_tensor(indices)
        check_dtype("indices", indices, INDEX_DTYPES)
        check_shape("indices", indices, ["M"])
        if indices.shape[0] > self.max_tokens:
            raise ValueError(
                f"indices must have at most max_tokens = {self.max_tokens} elements, "
                f"got {indices.shape[0]}"
            )
        if indices.device.type == "cpu" or env.is_debug():
            check_index_range("indices", indices, self.num_adapters)
        if indices.device != self.device and indices.device.type != "cpu":
            raise ValueError(
                f"indices must be in host memory or on the device of the routing ({self.device}), "
                f"got {indices.device}"
            )
        self._resize(indices.shape[0])
        if indices.shape[0]:
            self._build_from(indices)
        return self

    def _resize(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.indices = self._indices[:num_tokens]
        self.places = self._places[:num_tokens]

    @property
    def counts(self) -> Tensor:
        """int32 [tiles], how many distinct adapters each tile has."""
        return self.plan[:, 0]

    @property
    def slots(self) -> Tensor:
        """int32 [tiles, tile_m], distinct adapters by first appearance, ``counts`` are valid."""
        return self.plan[:, PLAN_HEADER : PLAN_HEADER + self.tile_m]

    def _build_from(self, indices: Tensor) -> None:
        is_on_host = indices.device.type == "cpu" and self.device.type == "cuda"
        # a graph would read the row at every replay, when it may belong to others
        if is_on_host and not torch.cuda.is_current_stream_capturing():
            with rows_for(self.device).holding(indices) as row:
                self._build(row)
        else:
            self._build(indices.to(self.device, non_blocking=True))

    def _build(self, source: Tensor) -> None:
        if self.device.type == "cuda":
            from loraplex.kernels.routing import launch_routing

            forget(self.indices, self.places, self.plan)
            launch_routing(
                source, self.indices, self.places, self.plan, self.num_adapters,
                tile_m=self.tile_m, item_m=item_height(self.tile_m),
            )  # fmt: skip
        elif self.device.type != "meta":  # which has no values
            build_routing(source, self.indices, self.places, self.plan)

    def __repr__(self) -> str:
        return (
            f"Routing(num_tokens={self.num_tokens}, max_tokens={self.max_tokens}, "
            f"num_adapters={self.num_adapters}, tile_m={self.tile_m}, device={str(self.device)!r})"
        )


def index_tensor(indices: object) -> Tensor:
    """Indices as a tensor: a tensor stays where it is, a sequence of ints goes to host memory.

    Raises:
        TypeError: anything else.
    """
    if isinstance(indices, Tensor):
        return check_tensor("indices", indices)
    if not isinstance(indices, Sequence):
        raise TypeError(f"indices must be a tensor or a sequence of ints, got {indices!r}")
    if any(isinstance(v, bool) or not isinstance(v, int) for v in indices):
        raise TypeError(f"indices must be whole numbers, got {list(indices)[:8]!r}")
    try:
        return torch.tensor(indices, dtype=torch.int64)
    except (ValueError, RuntimeError, OverflowError):
        raise ValueError(f"indices must fit int64, got {list(indices)[:8]!r}") from None
