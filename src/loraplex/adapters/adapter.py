"""What an adapter folder holds, as host tensors: nothing here knows of GPUs or of a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from loraplex.errors import AdapterError, UnsupportedAdapterError

if TYPE_CHECKING:
    from loraplex.adapters.spec import AdapterSpec

T = TypeVar("T")
Weights = TypeVar("Weights", bound="ModuleLora | EmbeddingLora | ParameterLora | TokenRows")


@dataclass(frozen=True)
class ModuleLora:
    """LoRA of one linear module.

    Semantics::

        y = g * (x @ W.T + scaling * (x @ a.T @ b.T + lora_bias)) + bias
        g = 1 without a magnitude, else magnitude / (W + scaling * b @ a).norm(dim=1)

    Rank 0 is a module without LoRA whose bias was trained (``bias="all"``).
    """

    name: str  # path in the model that was trained, without PEFT's prefixes and adapter name
    a: torch.Tensor  # [rank, in_features], dtype as in the file
    b: torch.Tensor  # [out_features, rank]
    scaling: float
    magnitude: torch.Tensor | None = None  # DoRA, [out_features]
    lora_bias: torch.Tensor | None = None  # lora_B.bias, [out_features]; times `scaling`
    bias: torch.Tensor | None = None  # [out_features]; replaces the bias of the base layer

    @property
    def rank(self) -> int:
        """Rows of `a`."""
        return self.a.shape[0]

    @property
    def in_features(self) -> int:
        """K of the layer it was trained on."""
        return self.a.shape[1]

    @property
    def out_features(self) -> int:
        """N of the layer it was trained on."""
        return self.b.shape[0]

    def rows(self, start: int, stop: int) -> ModuleLora:
        """The part that yields outputs start to stop: `a` is shared, all else is cut (views)."""

        def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[start:stop]

        return dataclasses.replace(
            self,
            name=f"{self.name}[{start}:{stop}]",
            b=self.b[start:stop],
            magnitude=cut(self.magnitude),
            lora_bias=cut(self.lora_bias),
            bias=cut(self.bias),
        )


@dataclass(frozen=True)
class EmbeddingLora:
    """LoRA of one embedding: a gather, not a GEMM.

    Semantics: ``e = g * (W[id] + scaling * (a[:, id] @ b.T))``, `g` as for a linear module with
    the norm taken over the vocabulary.
    """

    name: str
    a: torch.Tensor  # [rank, vocabulary]
    b: torch.Tensor  # [hidden, rank]
    scaling: float
    magnitude: torch.Tensor | None = None  # DoRA, [hidden]

    @property
    def rank(self) -> int:
        """Rows of `a`."""
        return self.a.shape[0]


@dataclass(frozen=True)
class ParameterLora:
    """LoRA of a stack of expert weights (PEFT's ``target_parameters``).

    Semantics: expert e gets ``scaling * B_e @ A_e`` with ``A_e = a[e * rank : (e + 1) * rank]``
    and ``B_e = b[:, e::num_experts]``; it is transposed when the model's parameter has the shape
    ``[E, in_features, out_features]``. That depends on the model, and on the peft that wrote the
    file: before 0.19.1 it took every stack for one with the inputs first.
    """

    name: str  # full parameter name, e.g. "model.layers.0.mlp.experts.gate_up_proj"
    a: torch.Tensor  # [num_experts * rank, in_features]
    b: torch.Tensor  # [out_features, rank * num_experts]
    scaling: float
    rank: int

    @property
    def num_experts(self) -> int:
        """Experts in the stack."""
        return self.a.shape[0] // self.rank

    def expert(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A `[rank, in_features]` and B `[out_features, rank]` of one expert (views)."""
        if not 0 <= index < self.num_experts:
            raise ValueError(f"index must be in [0, {self.num_experts}), got {index}")
        rows = slice(index * self.rank, (index + 1) * self.rank)
        return self.a[rows], self.b[:, index :: self.num_experts]


@dataclass(frozen=True)
class TokenRows:
    """Embedding rows that replace the base model's (PEFT's ``trainable_token_indices``)."""

    name: str
    indices: tuple[int, ...]
    rows: torch.Tensor  # [len(indices), hidden]


@dataclass(frozen=True)
class Adapter:
    """One adapter on the host: its spec and its tensors, in private memory, never half-loaded.

    Names are module paths of the model that was trained. `saved_modules` (PEFT's
    ``modules_to_save``, and embeddings that PEFT stores whole) and `base_copies` have parameter
    names, ``"lm_head.weight"``. `biases` belong to modules without LoRA (``bias="all"``).
    `base_copies` are frozen weights of the base that PEFT stored as well: no part of the adapter,
    only there to be compared with the base. `ignored` lists the tensors that ``strict=False``
    left out.
    """

    spec: AdapterSpec
    modules: Mapping[str, ModuleLora]
    embeddings: Mapping[str, EmbeddingLora] = field(default_factory=dict)
    parameters: Mapping[str, ParameterLora] = field(default_factory=dict)
    token_rows: Mapping[str, TokenRows] = field(default_factory=dict)
    biases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    saved_modules: Mapping[str, torch.Tensor] = field(default_factory=dict)
    base_copies: Mapping[str, torch.Tensor] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    path: str = ""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor that changes outputs, with a name for messages (no `base_copies`)."""
        groups: tuple[Mapping[str, object], ...] = (
            self.modules,
            self.embeddings,
            self.parameters,
            self.token_rows,
        )
        for group in groups:
            for name, part in group.items():
                for slot in dataclasses.fields(part):  # type: ignore[arg-type]
                    value = getattr(part, slot.name)
                    if isinstance(value, torch.Tensor):
                        yield f"{name}.{slot.name}", value
        yield from self.biases.items()
        yield from self.saved_modules.items()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that change outputs."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors())

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that occur, in order of first use."""
        return tuple(dict.fromkeys(tensor.dtype for _, tensor in self.tensors()))

    @property
    def max_rank(self) -> int:
        """The largest rank of any part; 0 when there is no LoRA at all."""
        ranks = [part.rank for part in self.modules.values()]
        ranks += [part.rank for part in self.embeddings.values()]
        ranks += [part.rank for part in self.parameters.values()]
        return max(ranks, default=0)

    def _lora_parts(self) -> list[ModuleLora | EmbeddingLora]:
        return [*self.modules.values(), *self.embeddings.values()]

    @property
    def features(self) -> frozenset[str]:
        """What it needs beyond LoRA on linear modules.

        Of ``"dora"``, ``"lora_bias"``, ``"bias"``, ``"embeddings"``, ``"modules_to_save"``,
        ``"target_parameters"``, ``"trainable_tokens"``, ``"alora"``.
        """
        parts = self._lora_parts()
        found = {
            "dora": any(part.magnitude is not None for part in parts),
            "lora_bias": any(part.lora_bias is not None for part in self.modules.values()),
            "bias": bool(self.biases) or any(p.bias is not None for p in self.modules.values()),
            "embeddings": bool(self.embeddings),
            "modules_to_save": bool(self.saved_modules),
            "target_parameters": bool(self.parameters),
            "trainable_tokens": bool(self.token_rows),
            "alora": self.spec.alora_invocation_tokens is not None,
        }
        return frozenset(name for name, present in found.items() if present)

    def require(self, supported: Collection[str]) -> None:
        """Refuse, by name, every feature that the caller does not carry.

        Raises:
            UnsupportedAdapterError: one of `features` is not in `supported`.
        """
        missing = sorted(self.features.difference(supported))
        if missing:
            details = "; ".join(f"{name} ({self._example_of(name)})" for name in missing)
            raise UnsupportedAdapterError(f"{self.path}: not supported here: {details}")

    def _example_of(self, feature: str) -> str:
        if feature == "alora":
            return f"alora_invocation_tokens={list(self.spec.alora_invocation_tokens or ())}"
        attribute = {"dora": "magnitude", "lora_bias": "lora_bias", "bias": "bias"}.get(feature)
        if attribute is not None:
            parts = self._lora_parts()
            names = [part.name for part in parts if getattr(part, attribute, None) is not None]
            names += list(self.biases) if feature == "bias" else []
        else:
            group: Mapping[str, object] = {
                "embeddings": self.embeddings,
                "modules_to_save": self.saved_modules,
                "target_parameters": self.parameters,
                "trainable_tokens": self.token_rows,
            }[feature]
            names = list(group)
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def without_base_copies(self) -> Adapter:
        """The same adapter without the copies of frozen base weights, once they were compared."""
        return dataclasses.replace(self, base_copies={})

    def to(self, dtype: torch.dtype) -> Adapter:
        """The same adapter with every tensor cast, refused where a finite value would overflow.

        Raises:
            AdapterError: a value does not fit `dtype`; names the tensor and the value.
        """
        if dtype not in FLOAT_DTYPES:
            raise TypeError(f"dtype must be one of {FLOAT_DTYPES}, got {dtype}")

        def cast(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return cast_finite(tensor, dtype, f"{self.path}: {name}")

        def cast_part(part: Weights) -> Weights:
            values = {slot.name: getattr(part, slot.name) for slot in dataclasses.fields(part)}
            changed: dict[str, Any] = {
                key: cast(f"{part.name}.{key}", value)
                for key, value in values.items()
                if isinstance(value, torch.Tensor)
            }
            return dataclasses.replace(part, **changed)

        return dataclasses.replace(
            self,
            modules=_map_values(self.modules, cast_part),
            embeddings=_map_values(self.embeddings, cast_part),
            parameters=_map_values(self.parameters, cast_part),
            token_rows=_map_values(self.token_rows, cast_part),
            biases={name: cast(name, t) for name, t in self.biases.items()},
            saved_modules={name: cast(name, t) for name, t in self.saved_modules.items()},
        )


FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _map_values(group: Mapping[str, T], change: Callable[[T], T]) -> Mapping[str, T]:
    return {name: change(part) for name, part in group.items()}


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite; many times faster than torch.isfinite."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # both are NaN where any value is
    return math.isfinite(low.item()) and math.isfinite(high.item())


def cast_finite(tensor: torch.Tensor, dtype: torch.dtype, label: str) -> torch.Tensor:
    """Cast with rounding to nearest; an overflow to infinity is refused, never stored."""
    cast = tensor.to(dtype)
    if cast is not tensor and not is_finite(cast):
        largest = tensor.abs().max().item()
        raise AdapterError(
            f"{label}: values up to {largest:.6g} do not fit {dtype} "
            f"(largest finite value {torch.finfo(dtype).max:.6g})"
        )
    return cast
