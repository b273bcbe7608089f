"""Where the programs of one launch meet: counters, and words that they leave for each other.

Counters are zero before and after every launch. A word behind them carries the number of the launch
that wrote it, so nobody sets it back. Each stream of each device has its own, as a BLAS library
keeps its workspace: launches on one stream follow each other, so they share. A CUDA graph keeps the
counters of the stream that it was captured on: two graphs captured on one stream must not be
replayed at the same time on two.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from loraplex.errors import LoraplexError

STREAMS = 256
PER_STREAM = 8192
# int32 behind the counters: number of the launch and what else it keeps, then the words
EXCHANGE_HEADER = 16
EXCHANGE_WORDS = 262144
# rows are allocated together, for so many streams of a device at once
BLOCK = 16

_rows: dict[tuple[int, int], Tensor] = {}
# two threads with new streams must not be given one row
_lock = threading.Lock()


@functools.cache
def _block(index: int, number: int) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise LoraplexError(
            "the counters of a device must exist before a CUDA graph is captured: "
            + (
                f"more than {number * BLOCK} streams came by, run this one's first call before"
                if number
                else "make an AdapterTable on the device first"
            )
        )
    width = PER_STREAM + EXCHANGE_HEADER + EXCHANGE_WORDS
    counters = torch.zeros((BLOCK, width), dtype=torch.int32, device=f"cuda:{index}")
    # other streams use their rows without waiting for the one that fills them
    torch.cuda.current_stream(index).synchronize()
    return counters


def reserve_counters(device: torch.device) -> Tensor | None:
    """Allocate counters of a tensor's device, so that they exist before a graph is captured.

    Returns:
        those of the first streams, for an engine that gives memory back while it sleeps; None
        without a GPU.

    Raises:
        LoraplexError: inside a graph capture, if they do not exist yet.
    """
    return _block(device.index, 0) if device.type == "cuda" else None


def counters_of(device: torch.device, count: int) -> Tensor:
    """Zeros [count] or more, int32, of the current stream; on a GPU with the words behind them.

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
    return _new_row(key) if row is None else row


def _new_row(key: tuple[int, int]) -> Tensor:
    with _lock:
        if key not in _rows:
            number = _row_number(key[0])
            _rows[key] = _block(key[0], number // BLOCK)[number % BLOCK]
        return _rows[key]


def _row_number(index: int) -> int:
    used = sum(device == index for device, _ in _rows)
    if used >= STREAMS:
        raise LoraplexError(f"streams that run loraplex must be at most {STREAMS} per device")
    return used
