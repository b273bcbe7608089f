"""The order of copies and compute: one copy stream, and marks on it and on the callers' streams."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in the work of a stream; the operations on it belong to its :class:`Timeline`."""


class Timeline(Protocol):
    """What a pool asks of a device. Everything but :meth:`synchronize` returns at once."""

    def adopt(self, memory: Tensor) -> None:
        """Hand device memory over to the copy stream, which alone writes it from now on."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Uninitialised host memory from which the device copies at full speed."""

    def copying(self) -> contextlib.AbstractContextManager[None]:
        """Within it, :meth:`copy_`, :meth:`clear_` and :meth:`mark` go to the copy stream."""

    def copy_(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy host memory to the device, pair by pair, after what is on the copy stream."""

    def clear_(self, target: Tensor) -> None:
        """Zero device memory, after everything already on the copy stream."""

    def stage(self, values: Tensor) -> Tensor:
        """A host copy that stays valid until the copies that are made from it next are done."""

    def mark(self, *, is_timed: bool = False) -> Mark:
        """The end of what is on the copy stream now; :meth:`seconds` takes timed marks only."""

    def caller(self) -> Hashable:
        """The caller's stream."""

    def mark_use(self) -> tuple[Hashable, Mark]:
        """The caller's stream, and the end of what is on it now."""

    def follow(self, mark: Mark) -> None:
        """Make the copy stream wait for a mark."""

    def gate(self, mark: Mark) -> None:
        """Make the caller's stream wait for a mark of the copy stream."""

    def is_reached(self, mark: Mark) -> bool:
        """Whether the device has passed a mark."""

    def synchronize(self, mark: Mark) -> None:
        """Block the host until the device has passed a mark."""

    def seconds(self, first: Mark, last: Mark) -> float:
        """Time between two timed marks of the copy stream that have been reached."""


class HostTimeline:
    """A device without streams: every copy is done when the call returns."""

    def adopt(self, memory: Tensor) -> None:  # noqa: D102
        pass

    def host_memory(self, num_bytes: int) -> Tensor:  # noqa: D102
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copying(self) -> contextlib.AbstractContextManager[None]:  # noqa: D102
        return contextlib.nullcontext()

    def copy_(self, targets: list[Tensor], sources: list[Tensor]) -> None:  # noqa: D102
        torch._foreach_copy_(targets, sources)

    def clear_(self, target: Tensor) -> None:  # noqa: D102
        target.zero_()

    def stage(self, values: Tensor) -> Tensor:  # noqa: D102
        return values

    def mark(self, *, is_timed: bool = False) -> Mark:  # noqa: D102
        return time.perf_counter()

    def caller(self) -> Hashable:  # noqa: D102
        return None

    def mark_use(self) -> tuple[Hashable, Mark]:  # noqa: D102
        return None, time.perf_counter()

    def follow(self, mark: Mark) -> None:  # noqa: D102
        pass

    def gate(self, mark: Mark) -> None:  # noqa: D102
        pass

    def is_reached(self, mark: Mark) -> bool:  # noqa: D102
        return True

    def synchronize(self, mark: Mark) -> None:  # noqa: D102
        pass

    def seconds(self, first: Mark, last: Mark) -> float:  # noqa: D102
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first


class CudaTimeline:
    """A CUDA (or ROCm) device with a copy stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def adopt(self, memory: Tensor) -> None:  # noqa: D102
        # It was allocated and cleared on the caller's stream, and a pool may go away mid-copy.
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        memory.record_stream(self.stream)

    def host_memory(self, num_bytes: int) -> Tensor:  # noqa: D102
        with torch.cuda.device(self._device):  # any thread, without touching another GPU
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copying(self) -> contextlib.AbstractContextManager[None]:  # noqa: D102
        return torch.cuda.stream(self.stream)

    def copy_(self, targets: list[Tensor], sources: list[Tensor]) -> None:  # noqa: D102
        # One call into C++, which lets other threads run: a loop here would stand in their way
        # before each copy. Between host and device it is a plain asynchronous copy per pair.
        torch._foreach_copy_(targets, sources, non_blocking=True)

    def clear_(self, target: Tensor) -> None:  # noqa: D102
        target.zero_()

    def stage(self, values: Tensor) -> Tensor:  # noqa: D102
        # torch keeps pinned memory from being reused while a copy from it is under way.
        return values.pin_memory()

    def mark(self, *, is_timed: bool = False) -> Mark:  # noqa: D102
        event = torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def caller(self) -> Hashable:  # noqa: D102
        return torch.cuda.current_stream(self._device).cuda_stream

    def mark_use(self) -> tuple[Hashable, Mark]:  # noqa: D102
        stream = torch.cuda.current_stream(self._device)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return stream.cuda_stream, event

    def follow(self, mark: Mark) -> None:  # noqa: D102
        assert isinstance(mark, torch.cuda.Event)
        self.stream.wait_event(mark)

    def gate(self, mark: Mark) -> None:  # noqa: D102
        assert isinstance(mark, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(mark)

    def is_reached(self, mark: Mark) -> bool:  # noqa: D102
        assert isinstance(mark, torch.cuda.Event)
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def synchronize(self, mark: Mark) -> None:  # noqa: D102
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()

    def seconds(self, first: Mark, last: Mark) -> float:  # noqa: D102
        assert isinstance(first, torch.cuda.Event)
        assert isinstance(last, torch.cuda.Event)
        return float(first.elapsed_time(last)) / 1e3


def timeline_of(device: torch.device) -> Timeline:
    """The timeline that suits a device."""
    return CudaTimeline(device) if device.type == "cuda" else HostTimeline()
