"""What an adopted Punica wrapper does when vLLM names the adapters of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from loraplex.engines.vllm.step import Step, slots_of


@dataclasses.dataclass
class OwnPath:
    """Layers that go on reading vLLM's own metadata.

    Attributes:
        used: per layer, the slots that hold weights for it; None if some layer does not say.
        is_base: whether vLLM's metadata says that all tokens are base tokens.
    """

    used: Sequence[set[int]] | None
    is_base: bool = False


def routed(own: Any) -> Any:
    """Keeps the step's routing, and vLLM's metadata for the layers on vLLM's own path only.

    vLLM builds its metadata with two synchronisations. Adapters seldom have weights for the layers
    that still read it (embeddings and the head), so their tokens are base tokens there, and where
    that is all tokens, nothing has to be built.
    """

    class Routed(own):  # type: ignore[misc]
        _loraplex_step: Step
        _loraplex_own: OwnPath

        def update_metadata(
            self,
            mapping: Any,
            lora_index_to_id: list[int | None],
            max_loras: int,
            vocab_size: int,
            **options: Any,
        ) -> None:
            """Take the adapter ids of the tokens (``index_mapping``) and prompts of a step."""
            slot_of_id = {id_: slot for slot, id_ in enumerate(lora_index_to_id) if id_ is not None}
            self._loraplex_step.set_(slots_of(mapping.index_mapping, slot_of_id))
            state = self._loraplex_own
            if state.used is not None:
                used = set().union(*state.used)
                ids = {id_ for id_, slot in slot_of_id.items() if slot in used}
                mapping = dataclasses.replace(
                    mapping,
                    index_mapping=_only(mapping.index_mapping, ids),
                    prompt_mapping=_only(mapping.prompt_mapping, ids),
                )
                if not (any(mapping.index_mapping) or any(mapping.prompt_mapping)):
                    self._say_base(mapping)
                    return
            state.is_base = False
            super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **options)

        def _say_base(self, mapping: Any) -> None:
            """vLLM's metadata for a step without adapters, for any number of tokens, built once."""
            self.is_prefill = mapping.is_prefill
            tokens, prompts = len(mapping.index_mapping), len(mapping.prompt_mapping)
            self.indices_len[:] = [tokens, prompts, prompts, tokens]
            if self._loraplex_own.is_base:
                return
            self._token_lora_indices.fill_(-1)
            self._sampler_indices.fill_(-1)
            self._sampler_indices_padded.zero_()
            self._embeddings_indices.zero_()
            for meta in (self.token_mapping_meta, self.prompt_mapping_meta):
                meta._reset()
                meta.no_lora_flag_cpu.fill_(True)
            self._loraplex_own.is_base = True

    return Routed


def _only(adapter_ids: Sequence[int], wanted: set[int]) -> tuple[int, ...]:
    """The ids, with 0 in place of those that are not wanted."""
    if not wanted:
        return (0,) * len(adapter_ids)
    return tuple(id_ if id_ in wanted else 0 for id_ in adapter_ids)
