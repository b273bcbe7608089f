"""Shapes of a model's layers as adapters see them, and what of an adapter lands on a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.adapters.adapter import ModuleLora

# Projections that checkpoints fuse by stacking their rows in this order. Layouts that interleave
# heads (GPT-NeoX query_key_value, InternLM2 wqkv) cannot be cut by rows and are not here.
FUSED_MEMBERS: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "W_pack": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one linear layer of the model, read from the layer itself.

    A packed layer has one slice per output and names them: `members[i]` is the last part of the
    name that an adapter uses for slice i, next to the layer (``model.layers.0.self_attn.qkv_proj``
    with member ``q_proj`` answers to ``model.layers.0.self_attn.q_proj``). A member that covers
    several slices is repeated. A plain layer has one slice and the member ``""``.

    Raises:
        ValueError: sizes not positive, or not one member per slice.

    Example:
        >>> LayerShape(4096, (4096, 1024, 1024), ("q_proj", "k_proj", "v_proj")).out_features
        6144
        >>> LayerShape.plain(4096, 11008).slices
        (11008,)
    """

    in_features: int
    slices: tuple[int, ...]
    members: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        if self.in_features < 1:
            raise ValueError(f"in_features must be positive, got {self.in_features}")
        if not self.slices or any(width < 1 for width in self.slices):
            raise ValueError(f"slices must be positive widths, got {self.slices}")
        if len(self.members) != len(self.slices):
            raise ValueError(
                f"members must name each of the {len(self.slices)} slices, got {self.members}"
            )
        if len(self.slices) > 1 and "" in self.members:
            raise ValueError(f"members of a packed layer must not be empty, got {self.members}")
        runs = [m for i, m in enumerate(self.members) if i == 0 or self.members[i - 1] != m]
        if len(set(runs)) != len(runs):
            raise ValueError(f"equal members must be next to each other, got {self.members}")

    @classmethod
    def plain(cls, in_features: int, out_features: int) -> LayerShape:
        """A layer that is not packed."""
        return cls(in_features, (out_features,))

    @property
    def out_features(self) -> int:
        """N of the layer, all slices together."""
        return sum(self.slices)


def shape_in_model(name: str, in_features: int, out_features: int, config: Any) -> LayerShape:
    """The shape of a linear layer of a transformers model, packed where it fuses projections.

    Phi-3's ``qkv_proj`` and ``gate_up_proj`` then take adapters of split projections as well as
    fused ones; every other layer is plain.

    Args:
        name: path of the layer.
        in_features, out_features: read from the layer itself.
        config: the model's configuration, which alone knows how wide q, k and v are.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
        >>> shape_in_model("layers.0.self_attn.qkv_proj", 32, 64, config).slices
        (32, 16, 16)
    """
    last = name.rpartition(".")[2]
    heads = getattr(config, "num_attention_heads", None)
    if last == "qkv_proj" and heads:
        groups = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        slices = (heads * width, groups * width, groups * width)
        if sum(slices) == out_features:
            return LayerShape(in_features, slices, FUSED_MEMBERS["qkv_proj"])
    if last == "gate_up_proj" and out_features % 2 == 0:
        half = out_features // 2
        return LayerShape(in_features, (half, half), FUSED_MEMBERS["gate_up_proj"])
    return LayerShape.plain(in_features, out_features)


@dataclass(frozen=True)
class LayerLora:
    """What an adapter adds to one layer: one entry per slice, None where it adds nothing."""

    slices: tuple[ModuleLora | None, ...]

    @property
    def max_rank(self) -> int:
        """The largest rank of any slice."""
        return max((part.rank for part in self.slices if part is not None), default=0)


Target = tuple[tuple[str, int], ...]  # (layer, slice) pairs whose rows follow one another


class LayerIndex(Mapping[str, Target]):
    """Every name an adapter may use for a layer → the slices that it covers.

    Layers under their own name, members of packed layers under the member's name, and fused names
    for layers that the model keeps apart.
    """

    def __init__(self, layers: Mapping[str, LayerShape]) -> None:
        self._targets: dict[str, Target] = {}
        for name, shape in layers.items():
            parent = name.rpartition(".")[0]
            self._add(name, tuple((name, i) for i in range(len(shape.slices))))
            for member in dict.fromkeys(shape.members):
                path = f"{parent}.{member}" if parent else member
                covered = [i for i, other in enumerate(shape.members) if other == member]
                if member and path != name:
                    self._add(path, tuple((name, i) for i in covered))
        self._add_fused()
        heads = [name for name in self._targets if name.rpartition(".")[2] == "lm_head"]
        self._head = self._targets[heads[0]] if len(heads) == 1 else None

    def _add(self, name: str, target: Target) -> None:
        if name in self._targets:
            raise ValueError(
                f"layers must have one place per name, got {name!r} for "
                f"{self._targets[name][0][0]!r} and {target[0][0]!r}"
            )
        self._targets[name] = target

    def _add_fused(self) -> None:
        families: dict[str, dict[str, Target]] = {}
        for name, target in self._targets.items():
            parent, dot, last = name.rpartition(".")
            families.setdefault(parent + dot, {})[last] = target
        for parent, family in families.items():
            for fused, members in FUSED_MEMBERS.items():
                if fused not in family and all(member in family for member in members):
                    self._targets[parent + fused] = sum((family[m] for m in members), ())

    def find(self, name: str) -> Target | None:
        """The slices of `name`; ``unembed_tokens`` is another spelling of a lone ``lm_head``."""
        found = self._targets.get(name)
        if found is None and name.rpartition(".")[2] == "unembed_tokens":
            return self._head
        return found

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) is not None

    def __getitem__(self, name: str) -> Target:
        return self._targets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)
