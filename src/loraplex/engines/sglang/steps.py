"""The routing of the step that runs now, built once however many layers ask for it."""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex.routing import Routing

LEAST_TOKENS = 16


class StepRouting:
    """Routings by size, filled by the first layer of a step that needs one.

    The launch that fills a routing is part of the step, so a CUDA graph holds it too, and a replay
    builds its routing from the slots that SGLang wrote before it. A graph has a routing of its own
    per number of tokens. Other steps share one per power of two: their number of tokens may be
    anything, and buffers for each would add up.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.device = device
        self._routings: dict[tuple[bool, int], Routing] = {}
        self._filled: dict[tuple[bool, int], int] = {}

    def begin(self) -> None:
        """Forget what was filled: the next step has other rows."""
        self._filled.clear()

    def get(self, token_slots: Tensor) -> Routing:
        """The routing of these tokens.

        Args:
            token_slots: int32 [M] on the device, the slot of each row, -1 = base only; the same
                values for every call with this M since :meth:`begin`.
        """
        num_tokens = token_slots.shape[0]
        is_captured = is_capturing(self.device)
        most = max(LEAST_TOKENS, 1 << max(0, num_tokens - 1).bit_length())
        key = (is_captured, num_tokens if is_captured else most)
        if key not in self._routings:
            # written in inference mode or not, as SGLang likes
            with torch.inference_mode(False):
                self._routings[key] = Routing.allocate(
                    key[1], num_adapters=self.num_slots, device=self.device
                )
        routing = self._routings[key]
        if self._filled.get(key) != num_tokens:
            routing.update_(token_slots)
            self._filled[key] = num_tokens
        return routing


def is_capturing(device: torch.device) -> bool:
    """Whether launches are being recorded into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
