"""What a launch in a CUDA graph may read before its predecessor in the graph has ended.

With programmatic dependent launch a kernel begins while the one before it still runs. A weight may
flow in meanwhile, if it is certain that the predecessor does not write it. Outside of graphs
nothing is taken for certain, and little would be gained: there the GPU waits for the host. In a
graph a tensor is settled if an earlier launch has read it and nobody has written to it since, as
far as torch (its version counter) and loraplex (:func:`forget`) know. Writes between two replays
are never in the way: a replay begins when everything before it on its stream has ended.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor

MOST_TENSORS = 64

# by id: the version of a tensor when a launch last read it, and a reference that says when it goes
_read: dict[int, tuple[int, weakref.ref[Tensor]]] = {}


def are_settled(*tensors: Tensor) -> bool:
    """Whether a launch now may read all of them early; from now on they count as read."""
    if len(tensors) > MOST_TENSORS:
        return False
    result = True
    for tensor in tensors:
        # inference tensors do not count writes; weights are what they are used for
        version = -1 if tensor.is_inference() else tensor._version
        key = id(tensor)
        known = _read.get(key)
        if known is None or known[0] != version or known[1]() is not tensor:
            result = False
            _read[key] = (version, weakref.ref(tensor, partial(_drop, key)))
    return result and torch.cuda.is_current_stream_capturing()


def forget(*tensors: Tensor) -> None:
    """Say that these tensors are being written in a way that torch does not see."""
    for tensor in tensors:
        _read.pop(id(tensor), None)


def _drop(key: int, gone: weakref.ref[Tensor]) -> None:
    # another tensor may have the id by now
    if key in _read and _read[key][1] is gone:
        del _read[key]
