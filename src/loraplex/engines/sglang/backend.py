"""SGLang's LoRA backend ``loraplex``: its ``triton_v2`` with other linear layers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loraplex.engines.sglang.dense import DenseLora
from loraplex.version import __version__

logger = logging.getLogger(__name__)
# The parent is known once SGLang is imported; see make_backend.
_Parent: Any = object


class FusedLinear(_Parent):  # type: ignore[misc]
    """What comes before SGLang's ``TritonV2LoRABackend`` in the backend's line of parents.

    Embeddings, the head, MoE layers and MLA stay what they are there, and so does the metadata of
    a step (the slot of each token), which is read from there.
    """

    @staticmethod
    def is_linear(kind: Any) -> bool:
        """Whether SGLang means a plain linear layer; see :func:`make_backend`."""
        raise NotImplementedError

    @staticmethod
    def most_tokens() -> int:
        """Most rows of a step outside of graphs; see :func:`make_backend`."""
        raise NotImplementedError

    def __init__(self, max_loras_per_batch: int, device: torch.device, **kwargs: Any) -> None:
        super().__init__(max_loras_per_batch, device, **kwargs)
        self.dense = DenseLora(
            max_loras_per_batch, torch.device(device), max_tokens=self.most_tokens()
        )
        logger.info("loraplex %s: LoRA backend is on", __version__)

    def prepare_lora_batch(
        self,
        forward_batch: Any,
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        use_decode_cuda_graph: bool,
        use_prefill_cuda_graph: bool = False,
    ) -> None:
        """Start a step: one slot per request; ranks and scalings of all slots."""
        super().prepare_lora_batch(
            forward_batch,
            weight_indices,
            lora_ranks,
            scalings,
            use_decode_cuda_graph,
            use_prefill_cuda_graph=use_prefill_cuda_graph,
        )
        self.dense.begin(weight_indices, lora_ranks, scalings)

    def reset_batch_state(self) -> None:
        """Forget the step: the next one has no requests here."""
        super().reset_batch_state()
        self.dense.steps.begin()

    def reset_routing_cache(self) -> None:
        """Build the routing again, so that the launches are part of the graph captured next."""
        super().reset_routing_cache()
        self.dense.steps.begin()

    def forward_with_base(
        self,
        layer: Any,
        x: Tensor,
        base_fn: Callable[[], Tensor],
        lora_a: Tensor,
        lora_b: Tensor,
        output_offset: Tensor,
        offsets: tuple[int, ...],
        *,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Base and LoRA of one layer [M, N]; what is no plain linear layer goes to the parent."""
        own = None
        if self.is_linear(kwargs.get("kind")) and kwargs.get("pruned_batch_info") is None:
            own = self.dense.layer_for(layer, x, lora_a, lora_b, offsets)
        if own is None:
            output: Tensor = super().forward_with_base(
                layer, x, base_fn, lora_a, lora_b, output_offset, offsets,
                all_reduce=all_reduce, **kwargs,
            )  # fmt: skip
            return output
        self.runner.set_num_tokens(x.shape[0])
        output = self.dense.forward(layer, own, x, self.runner.token_slots, base_fn)
        return output if all_reduce is None else all_reduce(output)


def make_backend(
    parent: Any, is_linear: Callable[[Any], bool], most_tokens: Callable[[], int]
) -> Any:
    """The backend class.

    Args:
        parent: SGLang's ``TritonV2LoRABackend``.
        is_linear: whether the ``kind`` that SGLang passes is a plain linear layer.
        most_tokens: how many rows a step outside of graphs may have.
    """
    # SGLang asks for the name "triton_v2" where it decides how MoE and MLA layers work together
    # with their backend. There this class is triton_v2, so it keeps the parent's name.
    members = {
        "is_linear": staticmethod(is_linear),
        "most_tokens": staticmethod(most_tokens),
        "__module__": __name__,
    }
    return type("LoraplexBackend", (FusedLinear, parent), members)
