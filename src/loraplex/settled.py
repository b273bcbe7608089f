"""What a launch in a CUDA graph may read before its predecessor in the graph has ended.

With programmatic dependent launch a kernel begins while the one before it still runs. A weight may
flow in meanwhile, if it is certain that the predecessor does not write it. Outside of graphs
nothing is taken for certain, and little would be gained: there the GPU waits for the host. In a
graph a tensor is settled if an earlier launch has read it and nobody has written to it since, as
far as torch (its version counter) and loraplex (:func:`forget`) know. Writes between two replays
are never in the way: a replay begins when everything before it on its stream has ended.

A tensor that no launch outside of a graph has read may be one that the captured code makes:
compiled code fills it with one value after the other, which no counter shows. It is not settled,
unless loraplex is who writes it.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

MOST_TENSORS = 64


class _Known(NamedTuple):
    """A tensor as it was when a launch last read it.

    Attributes:
        state: its version and its address; None if it has been written since.
        is_lasting: whether it is more than a captured graph's own: one that a launch outside of
            graphs has read, or that only loraplex writes.
        tensor: says when it goes.
    """

    state: tuple[int, int] | None
    is_lasting: bool
    tensor: weakref.ref[Tensor]


# by id
_known: dict[int, _Known] = {}


def are_settled(*tensors: Tensor) -> bool:
    """Whether a launch now may read all of them early; from now on they count as read."""
    if len(tensors) > MOST_TENSORS:
        return False
    is_captured = result = torch.cuda.is_current_stream_capturing()
    for tensor in tensors:
        # inference tensors do not count writes; weights are what they are used for
        version = -1 if tensor.is_inference() else tensor._version
        # assigning to .data changes the address only
        state = (version, tensor.data_ptr())
        known = _known.get(id(tensor))
        if known is not None and known.tensor() is not tensor:
            known = None
        is_lasting = not is_captured or (known is not None and known.is_lasting)
        if known is None or known.state != state or not known.is_lasting:
            result = False
            _keep(tensor, state, is_lasting)
    return result


def forget(*tensors: Tensor) -> None:
    """Say that loraplex is writing these tensors, in a way that torch does not see by itself."""
    for tensor in tensors:
        # whoever has a view of the tensor sees it by this
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        _keep(tensor, None, True)


def _keep(tensor: Tensor, state: tuple[int, int] | None, is_lasting: bool) -> None:
    key = id(tensor)
    _known[key] = _Known(state, is_lasting, weakref.ref(tensor, partial(_drop, key)))


def _drop(key: int, gone: weakref.ref[Tensor]) -> None:
    # another tensor may have the id by now
    if key in _known and _known[key].tensor is gone:
        del _known[key]
