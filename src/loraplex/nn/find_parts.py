"""From what an adapter has beyond linear layers to the parts of a model's modules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loraplex.adapters import EmbeddingLora, Matching, TokenRows
from loraplex.adapters.adapter import cast_finite, is_finite
from loraplex.errors import AdapterError, UnsupportedAdapterError
from loraplex.nn.linear import LoraLinear
from loraplex.nn.parts import EmbeddingDelta, Part, SavedWeights, TokenEmbedding, TokenLogits
from loraplex.nn.rowwise import Rowwise
from loraplex.pool.fold import column_scale


def unwrapped(module: nn.Module) -> nn.Module:
    """The model's own module behind those that stand in for it."""
    while isinstance(module, LoraLinear | Rowwise):
        module = module.base
    return module


@dataclass(frozen=True)
class PartFinder:
    """Builds the parts of adapters for one model, in host memory; `label` begins every message.

    Attributes:
        model: the attached model.
        layers: its linear layers that can have adapters.
        max_rank: largest rank that is accepted.
    """

    model: nn.Module
    layers: Mapping[str, nn.Linear]
    max_rank: int

    def find(self, matching: Matching, label: str) -> dict[str, Part]:
        """The part of every module that is more than a linear layer with LoRA.

        Raises:
            AdapterError: a rank above ``max_rank``, or values that do not fit the model's dtype.
            UnsupportedAdapterError: a module of a kind that cannot have parts.
        """
        parts: dict[str, Part] = {}
        taken = set(matching)

        def place(name: str, part: Part) -> None:
            if name in taken:
                raise UnsupportedAdapterError(
                    f"{label}: {name} has weights of two kinds (LoRA, modules_to_save or "
                    "trainable tokens), which is not supported on one module"
                )
            taken.add(name)
            parts[name] = part

        saved: dict[str, dict[str, Tensor]] = {}
        for full, tensor in matching.saved_modules.items():
            module, _, parameter = full.rpartition(".")
            saved.setdefault(module, {})[parameter] = tensor
        for name, tensors in saved.items():
            place(name, self._saved(name, tensors, label))
        for name, lora in matching.embeddings.items():
            place(name, self._delta(name, lora, label))
        for name, rows in matching.token_rows.items():
            for module, part in self._tokens(name, rows, label).items():
                place(module, part)
        return parts

    def _saved(self, name: str, tensors: Mapping[str, Tensor], label: str) -> SavedWeights:
        module = unwrapped(self.model.get_submodule(name))
        kind = type(module).__name__
        is_leaf = next(module.children(), None) is None and next(module.buffers(), None) is None
        is_norm = "norm" in kind.casefold() and is_leaf
        if not (name in self.layers or is_norm or module is self._embedding()):
            raise UnsupportedAdapterError(
                f"{label}: modules_to_save has {name}, a {kind}: only linear layers that attach "
                "did not exclude, norms and the input embedding can be an adapter's own"
            )
        own = {
            parameter: _private(tensor, module._parameters[parameter], f"{label}: {name}")
            for parameter, tensor in tensors.items()
        }
        return SavedWeights(own, module)

    def _delta(self, name: str, lora: EmbeddingLora, label: str) -> EmbeddingDelta:
        embedding = self._check_embedding(name, "LoRA", label)
        if lora.rank > self.max_rank:
            raise AdapterError(
                f"{label}: rank {lora.rank} > {self.max_rank}: embedding {name!r} has a larger "
                "rank than max_rank"
            )
        weight = embedding.weight
        scaling = lora.scaling * _multiple(embedding)
        if not math.isfinite(scaling):
            raise AdapterError(f"{label}: {name} has a scaling that is not finite, {scaling}")
        tensors = {
            "a": _private(lora.a.t(), weight, f"{label}: {name}.lora_embedding_A"),
            "b": _private(lora.b, weight, f"{label}: {name}.lora_embedding_B"),
        }
        if lora.magnitude is not None:
            scale = column_scale(weight.detach().t(), lora.a, lora.b, lora.scaling, lora.magnitude)
            if not is_finite(scale):
                raise AdapterError(f"{label}: the DoRA scale of {name} has values not finite")
            tensors["column_scale"] = scale
        return EmbeddingDelta(tensors, scaling)

    def _tokens(self, name: str, found: TokenRows, label: str) -> dict[str, Part]:
        embedding = self._check_embedding(name, "trainable tokens", label)
        rows = _private(found.rows, embedding.weight, f"{label}: {name}")
        indices = torch.tensor(found.indices)
        places = torch.full((embedding.num_embeddings,), -1)
        places[indices] = torch.arange(len(indices))
        inputs = {"rows": rows * _multiple(embedding), "places": places}
        parts: dict[str, Part] = {name: TokenEmbedding(inputs)}
        for head, module in self.layers.items():
            if module.weight is embedding.weight:
                if module._parameters["bias"] is not None:
                    raise UnsupportedAdapterError(
                        f"{label}: trainable tokens in {head}, a tied head with a bias"
                    )
                parts[head] = TokenLogits({"rows": rows, "indices": indices})
        return parts

    def _embedding(self) -> nn.Module:
        embedding: nn.Module = self.model.get_input_embeddings()  # type: ignore[operator]
        return unwrapped(embedding)

    def _check_embedding(self, name: str, what: str, label: str) -> nn.Embedding:
        module = unwrapped(self.model.get_submodule(name))
        if (
            not isinstance(module, nn.Embedding)
            or module.max_norm is not None
            or module is not self._embedding()
        ):
            raise UnsupportedAdapterError(
                f"{label}: {what} on {name}, a {type(module).__name__}: only the model's input "
                "embedding can have adapters"
            )
        return module


def _multiple(embedding: nn.Embedding) -> float:
    """What an embedding multiplies its rows by, as Gemma's does."""
    scale = getattr(embedding, "embed_scale", 1.0)
    return float(scale.to(embedding.weight.dtype) if isinstance(scale, Tensor) else scale)


def _private(tensor: Tensor, like: Tensor | None, label: str) -> Tensor:
    """A copy in host memory, contiguous, in the dtype of the model's parameter."""
    assert like is not None, "match found the parameter"
    if not is_finite(tensor):
        raise AdapterError(f"{label} has NaN or infinity among its values")
    return cast_finite(tensor, like.dtype, label).clone(memory_format=torch.contiguous_format)
