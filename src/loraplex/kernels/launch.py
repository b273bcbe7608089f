"""Launching a kernel, and launching it again without asking Triton what it was compiled for.

``kernel[grid](...)`` binds some fifty arguments, finds out what each is specialised on and looks
the compiled kernel up; at decode that takes longer than the GPU. Who knows that only addresses have
changed since an earlier launch keeps that launch and repeats it.

Triton specialises a kernel on its constants and options, on dtypes, on whether an int is 1 or a
multiple of 16, and on whether an address is a multiple of 16. Ints that follow from the number of
tokens are left out of that (``do_not_specialize``): a server would compile each kernel three times
over, whenever a step first has such a number. A repeated launch has the same
constants, options, dtypes and ints as the first, and its addresses must all be multiples of 16, as
those of the first were (:data:`ALIGNMENT`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

ALIGNMENT = 16
# descriptors that a launch keeps, one for each address that came by
MOST_DESCRIPTORS = 256

_thread = threading.local()


class NotRepeatableError(Exception):
    """Nobody but Triton itself can launch this again."""


class Note(NamedTuple):
    """One launch as it was asked for, and the compiled kernel that it came to."""

    kernel: Any
    compiled: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]

    def arguments(self) -> list[Any]:
        """All arguments in the order of the kernel's signature."""
        rest = self.kernel.arg_names[len(self.args) :]
        return [*self.args, *(self.constants[name] for name in rest)]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """``kernel[grid](*args, **constants)``, noted if somebody takes notes in this thread."""
    compiled = kernel[grid](*args, **constants)
    notes = getattr(_thread, "notes", None)
    if notes is not None:
        notes.append(Note(kernel, compiled, grid, args, constants))


@contextmanager
def taking_notes() -> Iterator[list[Note]]:
    """Inside, every launch of this thread is noted."""
    before = getattr(_thread, "notes", None)
    notes: list[Note] = []
    _thread.notes = notes
    try:
        yield notes
    finally:
        _thread.notes = before


class Launch:
    """A noted launch, ready to be repeated.

    Args:
        find: the number of a tensor's address among those that a repetition is given.

    Attributes:
        hooks: what Triton would call before this kernel; while there are any, it must not be
            repeated.

    Raises:
        NotRepeatableError: the launch was interpreted, is not for an NVIDIA GPU, or goes through
            parts of Triton that are not as they are known here.
    """

    def __init__(self, note: Note, find: Callable[[Tensor], int]) -> None:
        compiled = note.compiled
        if compiled is None or compiled.metadata.target.backend != "cuda":
            raise NotRepeatableError("not a compiled kernel of an NVIDIA GPU")
        self._compiled = compiled
        self.hooks: list[Any] = note.kernel.pre_run_hooks
        self._grid = (*note.grid, 1, 1)[:3]
        self._run = compiled.run
        fixed: list[Any] = []
        # where each argument is: among the descriptors, the fixed ones or the addresses
        places: list[tuple[str, int]] = []
        self._descriptors: list[_Descriptors] = []
        for value in note.arguments():
            if isinstance(value, Tensor):
                places.append(("address", find(value)))
            elif hasattr(value, "block_shape"):
                number = len(self._descriptors)
                self._descriptors.append(_Descriptors(value, compiled, number, find(value.base)))
                places.append(("descriptor", number))
                for number in (*value.shape, *value.strides):
                    places.append(("fixed", len(fixed)))
                    fixed.append(number)
            else:
                places.append(("fixed", len(fixed)))
                fixed.append(value)
        if self._descriptors:
            self._run = _without_search(self._run)
        self._fixed = tuple(fixed)
        first = {"descriptor": 0, "fixed": len(self._descriptors)}
        first["address"] = first["fixed"] + len(fixed)
        self._arguments = itemgetter(*(first[kind] + number for kind, number in places))

    def repeat(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch with these addresses, every one a multiple of :data:`ALIGNMENT`."""
        descriptors = [kept.at(addresses) for kept in self._descriptors]
        self._run(
            *self._grid, stream, self._compiled.function, self._compiled.packed_metadata,
            None, None, None, *self._arguments((*descriptors, *self._fixed, *addresses)),
        )  # fmt: skip


class _Descriptors:
    """The descriptors of one argument by address; shape, strides and block stay as they were."""

    def __init__(self, descriptor: Any, compiled: Any, number: int, address: int) -> None:
        described = getattr(compiled.metadata, "tensordesc_meta", None)
        if not described or described[number] is None:
            raise NotRepeatableError("the copy engine is not used as a descriptor says")
        self._metadata = described[number]
        self._address = address
        self._kept: dict[int, Any] = {}
        self._like = copy.copy(descriptor)
        object.__setattr__(self._like, "base", None)  # keeps no tensor alive

    def at(self, addresses: Sequence[int]) -> Any:
        address = addresses[self._address]
        found = self._kept.get(address)
        return self._make(address) if found is None else found

    def _make(self, address: int) -> Any:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        like = copy.copy(self._like)
        object.__setattr__(like, "base", _Base(address))
        made = make_tensordesc_arg(like, self._metadata)[0]
        if len(self._kept) >= MOST_DESCRIPTORS:
            self._kept.clear()
        self._kept[address] = made
        return made


class _Base(NamedTuple):
    """Of a tensor only its address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def _without_search(launcher: Any) -> Any:
    """Triton's launcher without its walk over all arguments in search of tensor descriptors."""
    try:
        bare = copy.copy(launcher)
        bare.launch = inspect.getclosurevars(launcher.launch).nonlocals["launcher"]
    except (AttributeError, KeyError, TypeError) as error:
        raise NotRepeatableError("Triton's launcher is another one than is known here") from error
    return bare


def is_watched() -> bool:
    """Whether somebody asked Triton to be told of launches, or to compile in another way."""
    knobs = _knobs()
    runtime = knobs.runtime
    return bool(
        _has_calls(runtime.launch_enter_hook)
        or _has_calls(runtime.launch_exit_hook)
        or runtime.debug
        or runtime.add_stages_inspection_hook is not None
        or knobs.compilation.instrumentation_mode
    )


@functools.cache
def _knobs() -> Any:
    from triton import knobs

    return knobs


def _has_calls(hook: Any) -> bool:
    # a chain of hooks, or in its place a function or None
    return bool(getattr(hook, "calls", hook is not None))
