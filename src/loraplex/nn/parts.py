"""What an adapter does to a module beyond LoRA on a linear layer, for the rows that use it."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Part(ABC):
    """Weights of one adapter for one module, and what the module yields with them.

    Attributes:
        tensors: the weights by name.
        is_whole: whether the output needs nothing of what the base module makes of the rows.
    """

    tensors: Mapping[str, Tensor]
    is_whole = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def to(self, device: torch.device) -> Part:
        """The same with its weights on a device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return dataclasses.replace(self, tensors=moved)

    @abstractmethod
    def own_output(self, x: Tensor, y: Tensor) -> Tensor:
        """The output for rows of this adapter.

        Args:
            x: the module's input, [rows, ...].
            y: what the module makes of it without this part; anything if ``is_whole``.
        """


@dataclass(frozen=True)
class SavedWeights(Part):
    """PEFT's ``modules_to_save``: parameters of the adapter's own in place of the module's.

    Parameters that the adapter does not have (a norm of which only the bias was trained) are the
    module's.
    """

    module: nn.Module
    is_whole = True

    def own_output(self, x: Tensor, y: Tensor) -> Tensor:
        """Run a twin of the module that has the adapter's weights."""
        # Other threads may run the module itself right now, so its weights stay where they are.
        twin = copy.copy(self.module)
        object.__setattr__(twin, "_parameters", {**self.module._parameters, **self.tensors})
        out: Tensor = twin(x)
        return out


@dataclass(frozen=True)
class EmbeddingDelta(Part):
    """LoRA of an embedding, a gather and a small product.

    Semantics::

        e = column_scale * (y + scaling * a[ids] @ b.T)

    The tensors are ``a`` [vocabulary, rank], ``b`` [hidden, rank], and for DoRA ``column_scale``,
    float32 [hidden].
    """

    scaling: float

    def own_output(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the delta of the tokens ``x``."""
        v = F.embedding(x, self.tensors["a"])
        y = y + self.scaling * F.linear(v, self.tensors["b"])
        scale = self.tensors.get("column_scale")
        return y if scale is None else (y * scale).to(y.dtype)


@dataclass(frozen=True)
class TokenEmbedding(Part):
    """Embeddings of some tokens replaced (PEFT's ``trainable_token_indices``).

    The tensors are ``rows`` [tokens, hidden] and ``places``, int64 [vocabulary]: the row of each
    token, -1 for those that keep the base model's.
    """

    def own_output(self, x: Tensor, y: Tensor) -> Tensor:
        """Exchange the embeddings of these tokens among ``x``."""
        places = self.tensors["places"][x]
        rows = self.tensors["rows"][places.clamp(min=0)]
        return torch.where((places >= 0)[..., None], rows, y)


@dataclass(frozen=True)
class TokenLogits(Part):
    """The same tokens in a head that is tied to the embedding.

    The tensors are ``rows`` [tokens, hidden] and ``indices``, int64 [tokens].
    """

    def own_output(self, x: Tensor, y: Tensor) -> Tensor:
        """Exchange the logits of these tokens."""
        return y.index_copy(-1, self.tensors["indices"], F.linear(x, self.tensors["rows"]))
