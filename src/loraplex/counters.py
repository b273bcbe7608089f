"""Counters at which the programs of one launch meet: zero before and after every launch.

Each stream of each device has its own, as a BLAS library keeps its workspace: launches on one
stream follow each other, so they share. A CUDA graph keeps the counters of the stream that it was
captured on: two graphs captured on one stream must not be replayed at the same time on two.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from loraplex.errors import LoraplexError

STREAMS = 256
PER_STREAM = 8192

_rows: dict[tuple[int, int], Tensor] = {}


@functools.cache
def _all_counters(index: int) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise LoraplexError(
            "the counters of a device must exist before a CUDA graph is captured: "
            "make an AdapterTable on the device first"
        )
    counters = torch.zeros((STREAMS, PER_STREAM), dtype=torch.int32, device=f"cuda:{index}")
    # other streams use their rows without waiting for the one that fills them
    torch.cuda.current_stream(index).synchronize()
    return counters


def reserve_counters(device: torch.device) -> Tensor | None:
    """Allocate the counters of a tensor's device, so that they exist before a graph is captured.

    Returns:
        all of them, for an engine that gives memory back while it sleeps; None without a GPU.

    Raises:
        LoraplexError: inside a graph capture, if they do not exist yet.
    """
    return _all_counters(device.index) if device.type == "cuda" else None


def counters_of(device: torch.device, count: int) -> Tensor:
    """Zeros [count], int32, of the current stream.

    Raises:
        LoraplexError: if more counters are wanted than a stream has, or more streams came by than
            there are rows.
    """
    if count > PER_STREAM:
        raise LoraplexError(f"count must be at most {PER_STREAM}, got {count}")
    if device.type != "cuda":
        return torch.zeros((count,), dtype=torch.int32, device=device)
    index = device.index
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    row = _rows.get(key)
    if row is None:
        row = _all_counters(index)[_row_number(index)]
        _rows[key] = row
    return row


def _row_number(index: int) -> int:
    used = sum(device == index for device, _ in _rows)
    if used >= STREAMS:
        raise LoraplexError(f"streams that run loraplex must be at most {STREAMS} per device")
    return used
