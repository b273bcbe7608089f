"""The right to use some adapters' slots until it is released."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from loraplex.errors import PoolError
from loraplex.pool.record import Record

if TYPE_CHECKING:
    from loraplex.pool.pool import AdapterPool


class Lease:
    """Adapters that stay on the device, in the same slots and with the same weights, until release.

    Made by :meth:`AdapterPool.acquire`; use it as a context manager around the step (or the whole
    request) that uses the slots. Work that was put on the current stream before :meth:`release`
    may still be running afterwards: nothing it reads is overwritten before it is done.

    Attributes:
        names: as asked for, None for the base model.
    """

    def __init__(
        self,
        pool: AdapterPool,
        names: Sequence[str | None],
        records: dict[str, Record],
    ) -> None:
        self.names = tuple(names)
        self._pool = pool
        self._loading: tuple[Record, ...] = ()
        self._waited: dict[tuple[Record, Hashable], int] = {}  # last arrival, per stream
        slots = {name: r.place.slot for name, r in records.items() if r.place is not None}
        self._indices = [-1 if name is None else slots[name] for name in names]
        # Emptied by whoever releases first: threads may race to end a request.
        self._held = [records]

    @property
    def is_released(self) -> bool:
        """Whether the adapters were given up."""
        return not self._held

    @property
    def indices(self) -> list[int]:
        """Slot of each name, in order, -1 for None.

        Raises:
            PoolError: the lease was released, so the slots may hold other adapters by now.
        """
        self._check_held()
        return list(self._indices)

    def expect(self, loading: Iterable[Record]) -> None:
        """Note those of its adapters that are still on their way."""
        self._loading = tuple(loading)

    def wait(self, layer: str | None = None) -> None:
        """Let the current stream wait for the adapters to arrive; the host does not wait.

        Needed only after ``acquire(names, wait=False)``: call it once before the step, or with
        each layer's name before that layer, so that the first layers run while the last ones are
        still on their way. Not inside a CUDA-graph capture: wait before the replay.

        Args:
            layer: one of the pool's layers; all of them if None.

        Raises:
            PoolError: the lease was released.
            ValueError: no such layer.
        """
        self._check_held()
        index = None if layer is None else self._pool.layer_index(layer)
        if not self._loading:
            return
        timeline = self._pool.timeline
        stream = timeline.caller()
        for record in self._loading:
            place = record.place
            assert place is not None
            last = len(place.arrivals) - 1 if index is None else int(place.layer_arrivals[index])
            if last > self._waited.get((record, stream), -1):
                timeline.gate(place.arrivals[last])
                self._waited[record, stream] = last

    def release(self) -> None:
        """Give the adapters up; a second call does nothing."""
        if not self._held:
            return
        use = self._pool.timeline.mark_use()  # first: if it fails, nothing has changed
        try:
            records = self._held.pop()
        except IndexError:
            return
        self._pool.end_lease(records.values(), use)

    def _check_held(self) -> None:
        if self.is_released:
            raise PoolError("the lease was released; its indices may belong to other adapters now")

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        # Releasing here would take the pool's lock at an arbitrary moment; say so instead.
        if getattr(self, "_held", None):
            warnings.warn(
                f"a lease on {len(self._held[0])} adapters was dropped without release",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        state = "released" if self.is_released else f"indices={self._indices}"
        return f"Lease({len(set(self.names) - {None})} adapters, {state})"
