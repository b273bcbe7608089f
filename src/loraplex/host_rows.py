"""Numbers in pinned host memory that a kernel reads by itself, without a copy to the device."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

SHORTEST = 256
"""Numbers that a row has room for at least, so that steps of all sizes share their rows."""


class HostRows:
    """Rows of pinned memory for the few numbers that every step brings to one device.

    A copy would wait in the copy engine behind all else that is on its way to the device, such as
    the adapters that a pool loads, and from ordinary memory it would stop the host as well. A
    kernel that reads the host's memory does neither.

    A row is written again when the work that was to read it is over. The host does not wait for
    that: if no row is free, there is one more from then on. So there are as many rows as the host
    ever was updates ahead of the device. They are kept here, and not by whoever asked, because
    queued work may outlive him.

    Args:
        device: whose streams read the rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._rows: list[tuple[torch.cuda.Event, Tensor]] = []

    def __len__(self) -> int:
        return len(self._rows)

    @contextlib.contextmanager
    def holding(self, values: Tensor) -> Iterator[Tensor]:
        """A row with these values for the work that is put on the current stream meanwhile.

        Args:
            values: host memory, integers [n] that fit int32; read before this returns.

        Yields:
            int32 [n] in pinned host memory.
        """
        row = self._take(values.shape[0])
        try:
            yield row[: values.shape[0]].copy_(values)
        finally:
            end = self._end()
            with self._lock:
                self._rows.append((end, row))

    def _take(self, count: int) -> Tensor:
        with self._lock:
            for i, (end, row) in enumerate(self._rows):
                if len(row) >= count and end.query():  # type: ignore[no-untyped-call]
                    del self._rows[i]
                    return row
        return self._new_row(max(SHORTEST, 1 << (count - 1).bit_length()))

    def _new_row(self, length: int) -> Tensor:
        with torch.cuda.device(self._device):
            return torch.empty(length, dtype=torch.int32, pin_memory=True)

    def _end(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


@functools.cache
def rows_for(device: torch.device) -> HostRows:
    """The rows of a device, the same for all who ask."""
    return HostRows(device)
