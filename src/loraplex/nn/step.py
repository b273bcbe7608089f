"""Which adapters the rows of the running forward pass use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from loraplex.nn.parts import Part
from loraplex.routing import Routing


class Step:
    """The slots of the rows of one batch, and its routing per sequence length.

    The layers of a model share one step, so a routing is built once per shape of the tokens: once
    for the prompt and once for all the decoding steps after it.

    Args:
        slots: one slot per row of the batch, -1 = base only.
        layers: names of the layers that any of these adapters changes.
        parts: for each module with rows that have weights of their own, which rows and what.
        num_adapters: L, the slots of the tables.
        device: where the layers are.
        may_expand: whether the model may run with a whole multiple of these rows, as generation
            does for beams and for several sequences per prompt.
    """

    def __init__(
        self,
        slots: Sequence[int],
        layers: frozenset[str],
        parts: Mapping[str, Sequence[tuple[Part, tuple[int, ...]]]],
        *,
        num_adapters: int,
        device: torch.device,
        may_expand: bool = False,
    ) -> None:
        self.layers = layers
        self.parts = parts
        self._slots = torch.tensor(slots, dtype=torch.int32, device=device)
        self._num_adapters = num_adapters
        self._may_expand = may_expand
        self._batch = len(slots)
        self._length = 1
        self._routings: dict[tuple[int, int], Routing] = {}
        self._rows: dict[tuple[tuple[int, ...], int], Tensor] = {}

    def begin(self, batch: int, length: int) -> None:
        """Say that a forward pass of ``batch`` rows of ``length`` tokens starts.

        Raises:
            ValueError: the rows are not those (or a multiple of those) that have adapters.
        """
        rows = self._slots.shape[0]
        is_multiple = self._may_expand and rows > 0 and batch % rows == 0
        if batch != rows and not is_multiple:
            raise ValueError(
                f"adapter_names must have one name or None per row of the batch ({batch}), "
                f"got {rows}"
            )
        self._batch, self._length = batch, length

    def routing(self, layer: str, shape: torch.Size) -> Routing:
        """The routing of an input of this shape: ``[batch, length, K]`` or ``[batch * length, K]``.

        Raises:
            ValueError: the tokens of the input are not those of the batch in their order, as in a
                layer that runs on a selection of tokens.
        """
        if len(shape) == 3 and shape[0] == self._batch:
            length = shape[1]
        elif len(shape) == 2 and shape[0] == self._batch * self._length:
            length = self._length
        else:
            raise self._shape_error(layer, shape)
        key = (self._batch, length)
        if key not in self._routings:
            self._routings[key] = self._build(*key)
        return self._routings[key]

    def select(self, module: str, x: Tensor) -> list[tuple[Part, Tensor | None]]:
        """The parts of a module and, along the first axis of ``x``, the rows of each.

        None in place of the rows says that all of them are that part's.

        Raises:
            ValueError: as :meth:`routing`.
        """
        is_tokens = not x.is_floating_point()
        if x.shape[0] == self._batch and (x.ndim != 2 or is_tokens or self._length == 1):
            per_row = 1
        elif x.ndim == 2 and x.shape[0] == self._batch * self._length:
            per_row = self._length
        else:
            raise self._shape_error(module, x.shape)
        per_row *= self._batch // max(1, self._slots.shape[0])
        return [
            (part, None if len(rows) == self._slots.shape[0] else self._rows_of(rows, per_row))
            for part, rows in self.parts[module]
        ]

    def _rows_of(self, rows: tuple[int, ...], per_row: int) -> Tensor:
        """Positions of rows that take ``per_row`` places each."""
        if (rows, per_row) not in self._rows:
            first = torch.tensor(rows, device=self._slots.device)[:, None] * per_row
            places = first + torch.arange(per_row, device=first.device)
            self._rows[rows, per_row] = places.view(-1)
        return self._rows[rows, per_row]

    def _shape_error(self, layer: str, shape: torch.Size) -> ValueError:
        return ValueError(
            f"layer {layer!r} got an input of shape {tuple(shape)} in a step of {self._batch} "
            f"rows with {self._length} tokens: a layer that runs on a selection of the tokens "
            "cannot have adapters; exclude it in attach"
        )

    def _build(self, batch: int, length: int) -> Routing:
        # Generation repeats each prompt's row in place, so copies of a row are neighbours.
        copies = batch // max(1, self._slots.shape[0])
        indices = self._slots.repeat_interleave(copies * length)
        return Routing.from_indices(indices, num_adapters=self._num_adapters)


class StepHolder:
    """The step that this thread runs; other threads run theirs on the same layers."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def current(self) -> Step | None:
        """The step of this thread, or None where only the base model runs."""
        step: Step | None = getattr(self._local, "step", None)
        return step

    @contextlib.contextmanager
    def use(self, step: Step) -> Iterator[None]:
        """Make ``step`` the current one while the body runs."""
        outer = self.current
        self._local.step = step
        try:
            yield
        finally:
            self._local.step = outer
