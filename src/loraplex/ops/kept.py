"""Calls that are like an earlier one: the same launches again, with other addresses.

Which kernels a call launches, on which grids, with which constants and numbers, and how much room
they work in, follows from the shapes, strides and dtypes of its tensors, from the table's layout,
from the choice and from the GPU. All of that is in the key or is compared, so what is left to do
for a call with a known key is to allocate, to collect the addresses and to launch.

Kept are only calls that do nothing else: torch is asked for memory, Triton for launches. Addresses
must be multiples of 16 bytes; nothing is kept or repeated in a graph capture, or while somebody
watches Triton's launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex import env
from loraplex.counters import counters_of
from loraplex.kernels.launch import (
    ALIGNMENT,
    Launch,
    Note,
    NotRepeatableError,
    is_watched,
    taking_notes,
)
from loraplex.ops.impls import precision_of
from loraplex.settled import are_settled
from loraplex.tuning import Choice, Problem, choose

# calls of a server differ in their number of tokens
MOST_CALLS = 2048
# every piece of room starts on a multiple of this many bytes
ROOM = 256
# what a call may ask of torch to be kept: memory, and views of what there is
HARMLESS = {"aten::empty", "aten::select", "aten::slice"}

_calls: dict[tuple[object, ...], Call | None] = {}
# not empty while somebody wants every call to go the long way
_reasons: list[str] = []


class Asked(NamedTuple):
    """A call that may be kept: its key, its tensors and their addresses."""

    key: tuple[object, ...]
    tensors: tuple[Tensor, ...]
    addresses: list[int]


@dataclass
class Call:
    """A call that was made once.

    Attributes:
        problem, impl, choice: what :func:`choose` was asked and what it answered.
        shape, dtype: of the result.
        rooms: first bytes of the pieces of room within one allocation of ``num_bytes``.
        has_counters: whether programs meet on counters.
        reads_early: whether launches in a graph may read before their predecessors end.
        hooks: of each launch what is to be called before it.
        read: addresses of the other tensors of calls whose tensors count as read.
    """

    problem: Problem
    impl: str
    choice: Choice
    shape: torch.Size
    dtype: torch.dtype
    rooms: list[int]
    num_bytes: int
    has_counters: bool
    reads_early: bool
    launches: list[Launch]
    hooks: list[list[Any]]
    read: set[tuple[int, ...]] = field(default_factory=set)


def ask(
    matrices: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    slices: Sequence[int],
    layout: Sequence[int],
    impl: str,
) -> Asked | None:
    """What :func:`repeat` and :func:`keep` want; None if this call must go the long way.

    Args:
        matrices: x, then tensors whose shapes and strides matter.
        rows: dense vectors, as long as x has rows or columns of y.
    """
    x = matrices[0]
    if _reasons or not is_on_current_gpu(x):
        return None
    tensors = (*matrices, *rows)
    addresses = [tensor.data_ptr() for tensor in tensors]
    if not are_aligned(addresses) or is_capturing() or not env.has_triton() or is_watched():
        return None
    precision = precision_of(x) if x.dtype is torch.float32 else ""
    key = (
        impl, tuple(slices), tuple(layout), x.device, precision,
        *[(tensor.shape, tensor.stride(), tensor.dtype) for tensor in matrices],
        *[tensor.dtype for tensor in rows],
    )  # fmt: skip
    return Asked(key, tensors, addresses)


def repeat(asked: Asked, read: Callable[[], Sequence[Tensor]]) -> Tensor | None:
    """The result of a call like an earlier one; None if there was none.

    Args:
        read: the tensors that a launch in a graph reads early, if nobody has written to them since.
    """
    call = _calls.get(asked.key)
    if call is None:
        return None
    if choose(call.problem, call.impl) is not call.choice:
        _calls.pop(asked.key, None)
        return None
    if any(call.hooks):
        return None
    device = asked.tensors[0].device
    y = torch.empty(call.shape, dtype=call.dtype, device=device)
    scratch = torch.empty((call.num_bytes,), dtype=torch.uint8, device=device)
    start = scratch.data_ptr()
    counters = counters_of(device, 1).data_ptr() if call.has_counters else 0
    made = y.data_ptr()
    # an allocator of the user's own may give anything
    if not are_aligned((made, counters, start)):
        return None
    addresses = [*asked.addresses, made, counters, *[start + room for room in call.rooms]]
    if call.reads_early:
        # They count as read from now on; only a graph's launch reads them early. Who writes to one
        # of them takes that back, as does a tensor that comes where one went: then a graph waits.
        others = tuple(asked.addresses[1:])
        if others not in call.read:
            if len(call.read) >= MOST_CALLS:
                call.read.clear()
            are_settled(*read())
            call.read.add(others)
    stream = current_stream(device)
    for launch in call.launches:
        launch.repeat(stream, addresses)
    return y


def keep(
    asked: Asked, choice: Choice, run: Callable[[], Tensor], problem: Problem, impl: str
) -> Tensor:
    """The result of ``run()``, which from now on :func:`repeat` gives if it can be repeated."""
    if asked.key in _calls:
        return run()
    counters = counters_of(asked.tensors[0].device, 1)
    with taking_notes() as notes, _Requests() as requests:
        y = run()
    call = None
    if requests.others <= HARMLESS:
        room = _Room(asked.tensors, y, counters)
        call = _call_of(notes, room, problem, impl, choice)
    if len(_calls) >= MOST_CALLS:
        _calls.clear()
    _calls[asked.key] = call
    return y


def _call_of(
    notes: list[Note], room: _Room, problem: Problem, impl: str, choice: Choice
) -> Call | None:
    try:
        launches = [Launch(note, room.find) for note in notes]
    except NotRepeatableError:
        return None
    y = room.known[room.y_at]
    linear = choice.configs["linear"]
    return Call(
        problem, impl, choice, y.shape, y.dtype, room.starts, room.num_bytes, room.has_counters,
        bool(linear.get("is_specialized")), launches, [launch.hooks for launch in launches],
    )  # fmt: skip


class _Room:
    """Which of a call's addresses belongs to a tensor: inputs, y, counters, then pieces of room."""

    def __init__(self, inputs: tuple[Tensor, ...], y: Tensor, counters: Tensor) -> None:
        self.known: list[Tensor] = [*inputs, y, counters]
        self.y_at = len(inputs)
        self.starts: list[int] = []
        self.num_bytes = 0
        self.has_counters = False
        self._storages = {t.untyped_storage().data_ptr() for t in self.known}

    def find(self, tensor: Tensor) -> int:
        """The number of its address; a tensor that is not known is room that the call made."""
        if tensor.data_ptr() % ALIGNMENT:
            raise NotRepeatableError("an address is none that a repetition may have")
        if tensor.numel() == 0:
            return self.y_at  # nobody goes there
        for number, known in enumerate(self.known):
            if tensor is known:
                self.has_counters |= number == self.y_at + 1
                return number
        storage = tensor.untyped_storage().data_ptr()
        if tensor.storage_offset() or not tensor.is_contiguous() or storage in self._storages:
            raise NotRepeatableError("a tensor is neither given nor room to work in")
        self._storages.add(storage)
        self.starts.append(self.num_bytes)
        self.num_bytes += -(-tensor.nbytes // ROOM) * ROOM
        self.known.append(tensor)
        return len(self.known) - 1


class _Requests(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.others: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.others.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Inside, every call goes the long way, for who wants to see or change what happens on it."""
    _reasons.append("asked to")
    try:
        yield
    finally:
        _reasons.pop()


def is_on_current_gpu(x: Tensor) -> bool:
    """Whether x is where Triton would launch; an NVIDIA GPU, since only that is known here."""
    return x.is_cuda and torch.version.hip is None and x.get_device() == torch._C._cuda_getDevice()


def is_capturing() -> bool:
    """Whether launches go into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int:
    """Handle of the stream that launches on this device go to."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def are_aligned(addresses: Sequence[int]) -> bool:
    """Whether all addresses are multiples of what Triton asks for."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits % ALIGNMENT == 0
