"""Sorted tensors + spec → the parts of an Adapter, each checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from loraplex.adapters.adapter import (
    FLOAT_DTYPES,
    Adapter,
    EmbeddingLora,
    ModuleLora,
    ParameterLora,
    TokenRows,
    is_finite,
)
from loraplex.adapters.name_regex import UnsupportedPatternError
from loraplex.adapters.sorting import (
    Group,
    SortedTensors,
    is_within,
    parameter_of,
    sort_tensors,
)
from loraplex.adapters.spec import AdapterSpec
from loraplex.errors import AdapterError, UnsupportedAdapterError


@dataclass(frozen=True)
class Assembler:
    """Builds the parts of one adapter; `label` begins every message."""

    spec: AdapterSpec
    label: str

    def assemble(self, tensors: Mapping[str, torch.Tensor], *, strict: bool) -> Adapter:
        """All parts, or an error.

        Raises:
            AdapterError: a tensor that is unknown, incomplete, of the wrong shape or not finite.
            UnsupportedAdapterError: a format or feature loraplex does not carry.
        """
        parts = sort_tensors(tensors, self.spec, self.label, strict=strict)
        try:
            adapter = self._parts(parts)
        except UnsupportedPatternError as error:
            raise UnsupportedAdapterError(f"{self.label}: adapter_config.json: {error}") from None
        self._check_content(adapter, parts, strict)
        self._check_values(adapter)
        return adapter

    def _parts(self, parts: SortedTensors) -> Adapter:
        modules: dict[str, ModuleLora] = {}
        embeddings: dict[str, EmbeddingLora] = {}
        parameters: dict[str, ParameterLora] = {}
        levels = Counter(name for name, _ in parts.lora)
        for (name, depth), group in parts.lora.items():
            if "embedding_a" in group:
                if levels[name] > 1:
                    raise AdapterError(f"{self.label}: {name}: LoRA of an embedding, twice")
                embeddings[name] = self._embedding(name, group)
                continue
            parameter = parameter_of(name, depth, levels[name], self.spec, self.label)
            if parameter is None or parameter.endswith(".weight"):
                # A two-dimensional weight is a linear layer under another name.
                modules[name] = self._module(name, parameter or name, group, parts.base)
            else:
                parameters[parameter] = self._parameter(parameter, group)
        return Adapter(
            spec=self.spec,
            modules=modules,
            embeddings=embeddings,
            parameters=parameters,
            token_rows=self._token_rows(parts.token_rows),
            biases=self._biases(parts.biases),
            saved_modules=parts.saved,
            base_copies=parts.base,
            ignored=tuple(sorted(parts.unknown)),
            path=self.label,
        )

    def _module(
        self, name: str, pattern_name: str, group: Group, base: dict[str, torch.Tensor]
    ) -> ModuleLora:
        a, b = group["lora_a"], group["lora_b"]
        self._check_pair(name, "lora", a, b)
        self._check_rank(name, a.shape[0], self.spec.rank_of(pattern_name))
        out_features = b.shape[0]
        magnitude, lora_bias = group.get("magnitude"), group.get("lora_bias")
        self._check_vector(name, "use_dora", magnitude, self.spec.use_dora, out_features)
        self._check_vector(name, "lora_bias", lora_bias, self.spec.lora_bias, out_features)
        bias = base.pop(f"{name}.bias", None) if self.spec.bias != "none" else None
        if bias is not None and tuple(bias.shape) != (out_features,):
            raise self._shape_error(name, "bias", bias, f"({out_features},)")
        return ModuleLora(
            name=name,
            a=a,
            b=b,
            scaling=self.spec.scaling_of(pattern_name),
            magnitude=magnitude,
            lora_bias=lora_bias,
            bias=bias,
        )

    def _embedding(self, name: str, group: Group) -> EmbeddingLora:
        a, b = group["embedding_a"], group["embedding_b"]
        self._check_pair(name, "lora_embedding", a, b)
        self._check_rank(name, a.shape[0], self.spec.rank_of(name))
        magnitude = group.get("magnitude")
        self._check_vector(name, "use_dora", magnitude, self.spec.use_dora, b.shape[0])
        if "lora_bias" in group:
            raise UnsupportedAdapterError(f"{self.label}: {name}: lora_bias on an embedding")
        return EmbeddingLora(name, a, b, self.spec.scaling_of(name), magnitude)

    def _parameter(self, name: str, group: Group) -> ParameterLora:
        a, b = group["lora_a"], group["lora_b"]
        self._check_pair(name, "lora", a, b)
        rank = self.spec.rank_of(name)
        if a.shape[0] % rank:
            raise AdapterError(
                f"{self.label}: {name}: lora_A has {a.shape[0]} rows, "
                f"not a multiple of the rank {rank} that adapter_config.json gives"
            )
        if "magnitude" in group or "lora_bias" in group:
            raise UnsupportedAdapterError(
                f"{self.label}: {name}: DoRA and lora_bias do not exist for target_parameters"
            )
        return ParameterLora(name, a, b, self.spec.scaling_of(name), rank)

    def _biases(self, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, bias in found.items():
            if bias.ndim != 1:
                raise self._shape_error(name, "bias", bias, "(out_features,)")
        return found

    def _token_rows(self, found: Mapping[str, torch.Tensor]) -> dict[str, TokenRows]:
        rows: dict[str, TokenRows] = {}
        listed = self.spec.trainable_token_indices
        for name, tensor in found.items():
            if isinstance(listed, tuple):
                fits = [listed]
            else:
                fits = [ids for key, ids in (listed or {}).items() if name.endswith(key)]
            if len(fits) != 1 or tensor.ndim != 2 or tensor.shape[0] != len(fits[0]):
                count = len(fits[0]) if len(fits) == 1 else "no"
                raise AdapterError(
                    f"{self.label}: {name}: trainable token rows have shape "
                    f"{tuple(tensor.shape)}, adapter_config.json lists {count} token ids for them"
                )
            if len(set(fits[0])) < len(fits[0]):
                raise AdapterError(
                    f"{self.label}: {name}: adapter_config.json lists a token id twice in "
                    f"trainable_token_indices: {list(fits[0])!r:.200}"
                )
            rows[name] = TokenRows(name, fits[0], tensor)
        return rows

    def _check_pair(self, name: str, prefix: str, a: torch.Tensor, b: torch.Tensor) -> None:
        """Two matrices that multiply."""
        for what, tensor in ((f"{prefix}_A", a), (f"{prefix}_B", b)):
            if tensor.ndim > 2:
                raise UnsupportedAdapterError(
                    f"{self.label}: {name}: {what} has shape {tuple(tensor.shape)}: "
                    "LoRA of convolutions is not supported"
                )
            if tensor.ndim < 2 or 0 in tensor.shape:
                rule = "with two dimensions, none 0 (was a sharded model saved without gathering?)"
                raise self._shape_error(name, what, tensor, rule)
        if a.shape[0] != b.shape[1]:
            raise AdapterError(
                f"{self.label}: {name}: {prefix}_A has rank {a.shape[0]} (shape {tuple(a.shape)}), "
                f"{prefix}_B has rank {b.shape[1]} (shape {tuple(b.shape)})"
            )

    def _check_rank(self, name: str, found: int, expected: int) -> None:
        if found != expected:
            source = "r" if expected == self.spec.r else "rank_pattern"
            raise AdapterError(
                f"{self.label}: {name}: the tensors have rank {found}, "
                f"adapter_config.json says {expected} ({source})"
            )

    def _check_vector(
        self, name: str, flag: str, tensor: torch.Tensor | None, wanted: bool, size: int
    ) -> None:
        """A vector is there exactly when the config asks for it."""
        what = {"use_dora": "lora_magnitude_vector", "lora_bias": "lora_B.bias"}[flag]
        if (tensor is not None) != wanted:
            has = "no " if tensor is None else "a "
            raise AdapterError(
                f"{self.label}: {name}: adapter_config.json says {flag}={str(wanted).lower()}, "
                f"but the file has {has}{what} for this module"
            )
        if tensor is not None and tuple(tensor.shape) != (size,):
            raise self._shape_error(name, what, tensor, f"({size},)")

    def _check_content(self, adapter: Adapter, parts: SortedTensors, strict: bool) -> None:
        if next(adapter.tensors(), None) is None:
            raise AdapterError(f"{self.label}: the file holds no adapter tensors")
        saved = [name.rpartition(".")[0] for name in parts.saved]
        missing = [
            entry
            for entry in self.spec.modules_to_save
            if not any(is_within(module, entry) for module in saved)
        ]
        if strict and missing:
            raise AdapterError(
                f"{self.label}: modules_to_save lists {missing}, but the file has no such weights "
                "(strict=False loads what there is)"
            )

    def _check_values(self, adapter: Adapter) -> None:
        """Finite values of a float dtype, and scales that are finite too."""
        for name, tensor in adapter.tensors():
            if tensor.dtype not in FLOAT_DTYPES:
                supported = ", ".join(str(dtype) for dtype in FLOAT_DTYPES)
                raise UnsupportedAdapterError(
                    f"{self.label}: {name} has dtype {tensor.dtype}, supported are {supported}"
                )
            if not tensor.numel():
                raise AdapterError(
                    f"{self.label}: {name} has no values, shape {tuple(tensor.shape)}"
                )
            if not is_finite(tensor):
                bad = int((~torch.isfinite(tensor)).sum())
                raise AdapterError(
                    f"{self.label}: {name} has {bad} of {tensor.numel()} values that are NaN or "
                    "infinite"
                )
        scaled = (adapter.modules, adapter.embeddings, adapter.parameters)
        for part in (part for group in scaled for part in group.values()):
            if not math.isfinite(part.scaling):
                raise AdapterError(f"{self.label}: {part.name}: scale {part.scaling} is not finite")

    def _shape_error(self, name: str, what: str, tensor: torch.Tensor, rule: str) -> AdapterError:
        return AdapterError(
            f"{self.label}: {name}: {what} must have shape {rule}, got {tuple(tensor.shape)}"
        )
