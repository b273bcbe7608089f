"""Parts of adapters on the device: the most recently used ones stay there."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from loraplex.nn.parts import Part


@dataclass(frozen=True, eq=False)
class Served:
    """One version of a registered adapter.

    Attributes:
        layers: linear layers that it changes; the pool has their weights.
        parts: what it has for other modules (or instead of LoRA), in host memory.
    """

    layers: frozenset[str]
    parts: Mapping[str, Part]

    @property
    def num_bytes(self) -> int:
        """Bytes of the parts."""
        return sum(part.num_bytes for part in self.parts.values())


class Residents:
    """Device copies of the parts of a few adapters.

    A whole head or embedding is as large as hundreds of adapters, so these do not share the pool's
    arena. Copies are made when a step needs them, which makes that step wait.

    Args:
        count: adapters whose parts stay on the device; a step may bring more.
        device: where to.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._device = device
        self._lock = threading.Lock()
        self._resident: OrderedDict[Served, Mapping[str, Part]] = OrderedDict()

    def fetch(self, wanted: Iterable[Served]) -> dict[Served, Mapping[str, Part]]:
        """The parts of these adapters on the device; they are valid as long as they are held."""
        found: dict[Served, Mapping[str, Part]] = {}
        with self._lock:
            for served in dict.fromkeys(wanted):
                if served.parts and served not in self._resident:
                    self._resident[served] = {
                        name: part.to(self._device) for name, part in served.parts.items()
                    }
                if served.parts:
                    self._resident.move_to_end(served)
                    found[served] = self._resident[served]
            while len(self._resident) > self._count:
                self._resident.popitem(last=False)
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            for part in (part for parts in found.values() for part in parts.values()):
                for tensor in part.tensors.values():
                    # So that their memory is not reused under a step that other threads queued.
                    tensor.record_stream(stream)
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies that stay on the device."""
        with self._lock:
            return sum(served.num_bytes for served in self._resident)

    def drop(self, served: Served) -> None:
        """Forget the copies of an adapter that was removed."""
        with self._lock:
            self._resident.pop(served, None)
