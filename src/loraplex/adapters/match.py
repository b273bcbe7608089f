"""``match``: which part of an adapter lands on which layer of a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from loraplex.adapters.adapter import (
    Adapter,
    EmbeddingLora,
    ModuleLora,
    ParameterLora,
    TokenRows,
)
from loraplex.adapters.prefixes import Renaming, find_renamings, rename
from loraplex.adapters.shapes import FUSED_MEMBERS, LayerIndex, LayerLora, LayerShape
from loraplex.adapters.sorting import sample
from loraplex.errors import AdapterError, UnsupportedAdapterError


@dataclass(frozen=True, eq=False)
class Matching(Mapping[str, LayerLora]):
    """An adapter laid out for one model: a mapping from layer name to LayerLora.

    Layers that the adapter does not touch are absent. The other parts have the model's names too
    (parameter names for `parameters` and `saved_modules`, module names else). `renaming` is the
    prefix that was exchanged, ``(old, new)``, and `ignored` what ``strict=False`` left out.
    """

    layers: Mapping[str, LayerLora]
    embeddings: Mapping[str, EmbeddingLora] = field(default_factory=dict)
    parameters: Mapping[str, ParameterLora] = field(default_factory=dict)
    token_rows: Mapping[str, TokenRows] = field(default_factory=dict)
    saved_modules: Mapping[str, torch.Tensor] = field(default_factory=dict)
    renaming: Renaming | None = None
    ignored: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> LayerLora:
        return self.layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


def match(
    adapter: Adapter,
    layers: Mapping[str, LayerShape],
    *,
    parameters: Mapping[str, Sequence[int]] | None = None,
    base_model: str | None = None,
    strict: bool = True,
) -> Matching:
    """Lay an adapter out on a model's layers, or say with names from both sides why it cannot be.

    Names are taken as they are; then one exchange of wrapper prefixes (``language_model.``,
    ``model.``) is tried for those that fit nothing, and used when only one fits. Fused and split
    projections meet in both directions: q, k and v (any of them) on a packed layer, and a fused
    ``qkv_proj`` or ``gate_up_proj`` cut by rows onto split layers. Widths are those of `layers`.

    Args:
        adapter: from ``load_adapter``.
        layers: the linear layers that can carry LoRA, by module path.
        parameters: shapes of the model's parameters by name, for the parts that are no LoRA of a
            linear layer (embeddings, modules_to_save, expert stacks). Without it they are refused.
        base_model: the model's name; a warning when the adapter was trained on another.
        strict: refuse an adapter with a part that matches nothing; False warns and lists it in
            ``Matching.ignored``. A wrong shape is refused in any case.

    Raises:
        AdapterError: parts that match nothing, or shapes that differ.
        UnsupportedAdapterError: parts that need `parameters`.

    Example:
        >>> import torch
        >>> from loraplex.adapters import Adapter, AdapterSpec, ModuleLora
        >>> q = ModuleLora("layers.0.q_proj", torch.ones(4, 32), torch.ones(64, 4), 2.0)
        >>> layers = {"model.layers.0.qkv": LayerShape(32, (64, 16), ("q_proj", "k_proj"))}
        >>> found = match(Adapter(AdapterSpec(r=4), {q.name: q}), layers)
        >>> [part and part.rank for part in found["model.layers.0.qkv"].slices]
        [4, None]
    """
    matcher = _Matcher(adapter, layers, parameters)
    if base_model is not None:
        warn_about_base(adapter, base_model)
    matching = matcher.run()
    if matching.ignored:
        if strict:
            raise matcher.missing_error()
        warnings.warn(
            f"{adapter.path}: {len(matching.ignored)} parts of the adapter match nothing in the "
            f"model and are ignored: {sample(matching.ignored)}",
            UserWarning,
            stacklevel=2,
        )
    return matching


class _Matcher:
    """One run of `match`."""

    def __init__(
        self,
        adapter: Adapter,
        layers: Mapping[str, LayerShape],
        parameters: Mapping[str, Sequence[int]] | None,
    ) -> None:
        self.adapter = adapter
        self.layers = layers
        self.index = LayerIndex(layers)
        self.has_parameters = parameters is not None
        self.parameters = {name: tuple(shape) for name, shape in (parameters or {}).items()}
        self.slots: dict[str, list[ModuleLora | None]] = {}
        self.ignored: list[str] = []
        self.renaming = self._find_renaming()

    def run(self) -> Matching:
        """Place everything; what has no place is in `ignored`."""
        for module in self.adapter.modules.values():
            self._place(module)
        saved = self._saved()
        for name, bias in self.adapter.biases.items():
            self._place_bias(name, bias, saved)
        matching = Matching(
            embeddings=self._embeddings(),
            parameters=self._expert_stacks(),
            token_rows=self._token_rows(),
            saved_modules=saved,
            layers={name: LayerLora(tuple(slots)) for name, slots in self.slots.items()},
            renaming=self.renaming,
            ignored=tuple(self.ignored),
        )
        self._check_copies()
        return matching

    def _find_renaming(self) -> Renaming | None:
        adapter = self.adapter
        names = [name for name in (*adapter.modules, *adapter.biases) if name not in self.index]
        if self.has_parameters:
            whole = (*adapter.parameters, *adapter.saved_modules)
            names += [name for name in whole if name not in self.parameters]
            tables = (*adapter.embeddings, *adapter.token_rows)
            names += [f"{n}.weight" for n in tables if f"{n}.weight" not in self.parameters]
        found = find_renamings(names, {*self.index, *self.parameters})
        if len(found) > 1:
            ways = ", ".join(f"{old or '(nothing)'} → {new or '(nothing)'}" for old, new in found)
            raise AdapterError(
                f"{adapter.path}: the adapter's names fit the model in more than one way "
                f"(prefix {ways}): {self._both_sides(names)}"
            )
        return found[0] if found else None

    def _renamed(self, name: str) -> str:
        return name if self.renaming is None else rename(name, self.renaming)

    def _parameter_name(self, name: str) -> str | None:
        """The model's name of a parameter: as it is, or renamed, or None."""
        if name in self.parameters:
            return name
        renamed = self._renamed(name)
        return renamed if renamed in self.parameters else None

    def _place(self, module: ModuleLora) -> None:
        target = self.index.find(module.name) or self.index.find(self._renamed(module.name))
        if target is None:
            self.ignored.append(module.name)
            return
        widths = [self.layers[layer].slices[i] for layer, i in target]
        for layer, _ in target:
            self._check_shape(module, layer, sum(widths))
        start = 0
        for (layer, i), width in zip(target, widths, strict=True):
            part = module if len(target) == 1 else module.rows(start, start + width)
            start += width
            slots = self.slots.setdefault(layer, [None] * len(self.layers[layer].slices))
            other = slots[i]
            if other is not None:
                raise AdapterError(
                    f"{self.adapter.path}: {other.name} and {part.name} both land on {layer} "
                    f"(slice {i})"
                )
            slots[i] = part

    def _check_shape(self, module: ModuleLora, layer: str, out_features: int) -> None:
        in_features = self.layers[layer].in_features
        if module.in_features != in_features:
            raise AdapterError(
                f"{self.adapter.path}: {module.name}: lora_A has shape {tuple(module.a.shape)}, "
                f"layer {layer} takes {in_features} features: expected ({module.rank}, "
                f"{in_features}); was the adapter trained on another base model?"
            )
        if module.out_features != out_features:
            raise AdapterError(
                f"{self.adapter.path}: {module.name}: lora_B has shape {tuple(module.b.shape)}, "
                f"layer {layer} has {out_features} outputs there: expected ({out_features}, "
                f"{module.rank}){_added_tokens(module.name, module.out_features, out_features)}"
            )

    def _place_bias(self, name: str, bias: torch.Tensor, saved: dict[str, torch.Tensor]) -> None:
        """A trained bias without LoRA: rank 0 on a linear layer, else a plain replacement."""
        target = self.index.find(name) or self.index.find(self._renamed(name))
        if target is None:
            parameter = self._parameter_name(f"{name}.bias")
            if parameter is None:
                self.ignored.append(f"{name}.bias")
            else:
                self._check_equal(f"{name}.bias", bias.shape, parameter)
                saved[parameter] = bias
            return
        width = sum(self.layers[layer].slices[i] for layer, i in target)
        if tuple(bias.shape) != (width,):
            raise AdapterError(
                f"{self.adapter.path}: {name}.bias has shape {tuple(bias.shape)}, layer "
                f"{target[0][0]} has {width} outputs there: expected ({width},)"
            )
        in_features = self.layers[target[0][0]].in_features
        a, b = bias.new_empty(0, in_features), bias.new_empty(bias.shape[0], 0)
        self._place(ModuleLora(name, a, b, scaling=1.0, bias=bias))

    def _embeddings(self) -> dict[str, EmbeddingLora]:
        placed: dict[str, EmbeddingLora] = {}
        for name, part in self.adapter.embeddings.items():
            parameter = self._parameter_name(f"{name}.weight")
            if parameter is None:
                self.ignored.append(f"{name} (embedding)")
                continue
            self._check_equal(name, (part.a.shape[1], part.b.shape[0]), parameter)
            if part.a.shape[0] != part.b.shape[1]:
                raise AdapterError(
                    f"{self.adapter.path}: {name}: a has shape {tuple(part.a.shape)}, b "
                    f"{tuple(part.b.shape)}: the ranks differ"
                )
            placed[parameter.removesuffix(".weight")] = part
        return placed

    def _expert_stacks(self) -> dict[str, ParameterLora]:
        placed: dict[str, ParameterLora] = {}
        for name, part in self.adapter.parameters.items():
            parameter = self._parameter_name(name)
            if parameter is None:
                self.ignored.append(f"{name} (target_parameters)")
                continue
            shape = (part.num_experts, part.b.shape[0], part.a.shape[1])
            if self.parameters[parameter] != (shape[0], shape[2], shape[1]):  # [E, in, out] models
                self._check_equal(name, shape, parameter)
            placed[parameter] = part
        return placed

    def _token_rows(self) -> dict[str, TokenRows]:
        placed: dict[str, TokenRows] = {}
        for name, part in self.adapter.token_rows.items():
            parameter = self._parameter_name(f"{name}.weight")
            if parameter is None:
                self.ignored.append(f"{name} (trainable tokens)")
                continue
            vocabulary = self.parameters[parameter][0]
            rows = max(vocabulary, max(part.indices, default=-1) + 1)
            self._check_equal(name, (rows, part.rows.shape[1]), parameter)
            if part.rows.shape[0] != len(part.indices) or min(part.indices, default=0) < 0:
                raise AdapterError(
                    f"{self.adapter.path}: {name}: token rows must be one per token id from 0, "
                    f"got shape {tuple(part.rows.shape)} for {list(part.indices)!r:.200}"
                )
            placed[parameter.removesuffix(".weight")] = part
        return placed

    def _saved(self) -> dict[str, torch.Tensor]:
        placed: dict[str, torch.Tensor] = {}
        for name, tensor in self.adapter.saved_modules.items():
            parameter = self._parameter_name(name)
            if parameter is None:
                self.ignored.append(f"{name} (modules_to_save)")
                continue
            self._check_equal(name, tensor.shape, parameter)
            placed[parameter] = tensor
        return placed

    def _check_copies(self) -> None:
        """Copies of the base in the file have the shapes of this base."""
        for name, tensor in self.adapter.base_copies.items():
            parameter = self._parameter_name(name)
            if parameter is not None:
                self._check_equal(f"{name} (a copy of the base)", tensor.shape, parameter)

    def _check_equal(self, name: str, found: Sequence[int], parameter: str) -> None:
        expected = self.parameters[parameter]
        if tuple(found) != expected:
            hint = _added_tokens(parameter, found[0], expected[0]) if found and expected else ""
            raise AdapterError(
                f"{self.adapter.path}: {name} is for a parameter of shape {tuple(found)}, "
                f"the model's {parameter} has {expected}{hint}"
            )

    def missing_error(self) -> AdapterError:
        """What matched nothing, with samples of both sides."""
        label = self.adapter.path
        missing = self.ignored
        if not self.has_parameters and not any(name in self.adapter.modules for name in missing):
            return UnsupportedAdapterError(
                f"{label}: parts that are no LoRA of a linear layer have no place here: "
                f"{sample(missing)}"
            )
        adapter = self.adapter
        total = len(adapter.modules) + len(adapter.biases) + len(adapter.embeddings)
        total += len(adapter.parameters) + len(adapter.token_rows) + len(adapter.saved_modules)
        return AdapterError(
            f"{label}: {len(missing)} of {total} parts of the adapter matched nothing: "
            f"{self._both_sides(missing)}"
        )

    def _both_sides(self, names: Sequence[str]) -> str:
        """Samples of both sides, the model's names that look alike first."""
        wanted = {name.rpartition(".")[2] for name in names}
        known = sorted({*self.layers, *self.parameters}, key=lambda name: name.count("."))
        alike = [name for name in known if name.rpartition(".")[2] in wanted]
        shown = sample(alike or known) if known else "no layers"
        fused = [
            f"{parent}.{packed}".removeprefix(".")
            for parent, _, last in (name.rpartition(".") for name in names)
            for packed, members in FUSED_MEMBERS.items()
            if last in members and f"{parent}.{packed}".removeprefix(".") in self.layers
        ]
        hint = f"; {fused[0]} is fused: its LayerShape has to name its members" if fused else ""
        return f"the adapter has {sample(names)}; the model has {shown}{hint}"


def warn_about_base(adapter: Adapter, base_model: str) -> None:
    """Warn when the adapter names another base; only the last part of a path is compared."""
    trained_on = adapter.spec.base_model
    if trained_on is None or _short_name(trained_on) == _short_name(base_model):
        return
    warnings.warn(
        f"{adapter.path}: the adapter was trained on {trained_on!r}, the model is {base_model!r}",
        UserWarning,
        stacklevel=3,
    )


def _short_name(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].casefold()


def _added_tokens(name: str, found: int, expected: int) -> str:
    """The usual reason why vocabulary-sized tensors differ."""
    parts = name.split(".")
    if not {"lm_head", "embed_tokens", "wte", "unembed_tokens"}.intersection(parts):
        return ""
    return (
        f"; {found} against {expected} rows: were added tokens part of the training? Then the base "
        "model's vocabulary has to be resized in the same way first"
    )
