"""From an adapter's tensors to the one block of bytes that every tier stores."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex.adapters import LayerLora, LayerShape, ModuleLora
from loraplex.checks import REFERENCE_DTYPES, check_shape, check_tensor, dtype_name
from loraplex.errors import AdapterError, UnsupportedAdapterError
from loraplex.pool.fold import adapter_bias, column_scale
from loraplex.pool.layout import Layout, lay_out, padded_rank, row_stride
from loraplex.pool.pages import IntArray
from loraplex.table import (
    A_PTR,
    A_STRIDE,
    B_PTR,
    B_STRIDE,
    BIAS_PTR,
    COLUMN_SCALE_PTR,
    ENTRY_FIELDS,
    RANK,
    SCALING,
)

FLOAT32_MAX = torch.finfo(torch.float32).max

LayerTensor = Callable[[str], Tensor]
LayerTensorOrNone = Callable[[str], "Tensor | None"]


@dataclass(frozen=True)
class Manifest:
    """All that is known of a packed adapter apart from its bytes.

    Attributes:
        layout: where the pieces lie in the pages.
        records: int64 [layers, S_max, 8], the table's records with empty pointers.
        targets: [pieces] position in ``records.ravel()`` of the pointer to each piece.
        layer_pages: [layers] last page that a layer needs, counted within the adapter; -1 if none.
        max_rank: largest rank as trained.
        has_column_scale, has_bias: whether any layer needs them.
    """

    layout: Layout
    records: IntArray
    targets: IntArray
    layer_pages: IntArray
    max_rank: int
    has_column_scale: bool
    has_bias: bool

    def entries(self, address: int, pages: IntArray) -> IntArray:
        """The table's records for an adapter whose pages lie at ``pages`` of an arena."""
        layout = self.layout
        entries = self.records.copy()
        entries.reshape(-1)[self.targets] = (
            address + pages[layout.pages] * layout.page_bytes + layout.offsets
        )
        return entries


@dataclass(frozen=True)
class Packer:
    """Packs adapters for one set of layers; immutable, so threads may share it.

    Attributes:
        layers: the model's layers, in the order in which they run.
        dtype: dtype of the stored A and B.
        page_bytes: size of a page.
        max_rank: largest rank that is accepted.
        has_column_scale, has_bias: what the tables of the pool provide for.
        base_weight: weight [N, K] of a layer, needed for DoRA.
        base_bias: bias [N] of a layer or None, needed for biases that replace the layer's own.
    """

    layers: Mapping[str, LayerShape]
    dtype: torch.dtype
    page_bytes: int
    max_rank: int
    has_column_scale: bool
    has_bias: bool
    base_weight: LayerTensor | None
    base_bias: LayerTensorOrNone | None

    def pack(self, matched: Mapping[str, LayerLora]) -> tuple[Manifest, Tensor]:
        """Cast, pad, fold and lay out an adapter.

        Returns:
            The manifest and uint8 [num_pages, page_bytes]; every byte that no piece owns is zero.

        Raises:
            TypeError, ValueError: something else than ``match`` makes for these layers.
            AdapterError: a rank above ``max_rank``, or values that are not finite in ``dtype``.
            UnsupportedAdapterError: DoRA or biases for which the pool was not prepared.
        """
        self._check_matched(matched)
        widest = max(len(shape.slices) for shape in self.layers.values())
        records = np.zeros((len(self.layers), widest, ENTRY_FIELDS), dtype=np.int64)
        pieces: list[Tensor] = []
        fields: list[tuple[int, int, int]] = []
        max_rank = 0
        for i, (name, shape) in enumerate(self.layers.items()):
            lora = matched.get(name)
            start = 0
            for s, width in enumerate(shape.slices):
                module = lora.slices[s] if lora is not None else None
                if module is not None:
                    found = self._slice_pieces(name, shape, start, width, module)
                    records[i, s] = _record(shape, module)
                    pieces += found.values()
                    fields += [(i, s, field) for field in found]
                    max_rank = max(max_rank, module.rank)
                start += width
        layout = lay_out(tuple(p.numel() * p.element_size() for p in pieces), self.page_bytes)
        where = np.array(fields, dtype=np.int64).reshape(-1, 3)
        layer_pages = np.full(len(self.layers), -1, dtype=np.int64)
        np.maximum.at(layer_pages, where[:, 0], layout.last_pages)
        manifest = Manifest(
            layout=layout,
            records=records,
            targets=(where[:, 0] * widest + where[:, 1]) * ENTRY_FIELDS + where[:, 2],
            layer_pages=layer_pages,
            max_rank=max_rank,
            has_column_scale=bool((where[:, 2] == COLUMN_SCALE_PTR).any()),
            has_bias=bool((where[:, 2] == BIAS_PTR).any()),
        )
        return manifest, _image(layout, pieces)

    def _slice_pieces(
        self, layer: str, shape: LayerShape, start: int, width: int, module: ModuleLora
    ) -> dict[int, Tensor]:
        """The tensors of one slice by the field of the record that points to them."""
        self._check_module(shape, width, module)
        rank, stored = module.rank, padded_rank(module.rank)
        pieces: dict[int, Tensor] = {}
        scale = None
        if rank:
            a = torch.zeros(stored, row_stride(shape.in_features), dtype=self.dtype)
            b = torch.zeros(width, stored, dtype=self.dtype)
            a[:rank, : shape.in_features] = self._cast(module, "lora_A", module.a)
            b[:, :rank] = self._cast(module, "lora_B", module.b)
            pieces[A_PTR], pieces[B_PTR] = a, b
        if module.magnitude is not None:
            scale = self._column_scale(layer, start, width, module, module.magnitude)
            pieces[COLUMN_SCALE_PTR] = _finite(module, "DoRA scale", scale)
        bias = self._bias(layer, start, width, module, scale)
        if bias is not None:
            pieces[BIAS_PTR] = _finite(module, "bias", bias)
        return pieces

    def _check_matched(self, matched: Mapping[str, LayerLora]) -> None:
        """Nothing of an adapter may be left out because it is for other layers."""
        if not isinstance(matched, Mapping):
            raise TypeError(f"matched must map layers to LayerLora, got {matched!r:.80}")
        for name, lora in matched.items():
            if not isinstance(lora, LayerLora):
                raise TypeError(f"matched[{name!r}] must be a LayerLora, got {type(lora).__name__}")
            if name not in self.layers:
                raise ValueError(
                    f"matched must hold layers of the pool ({len(self.layers)} of them), "
                    f"got {name!r}"
                )
            count = len(self.layers[name].slices)
            if len(lora.slices) != count:
                raise ValueError(
                    f"matched[{name!r}] must have {count} slices, got {len(lora.slices)}"
                )
            for part in lora.slices:
                if part is not None and not isinstance(part, ModuleLora):
                    raise TypeError(
                        f"matched[{name!r}] must hold ModuleLora and None, got {part!r:.80}"
                    )

    def _check_module(self, shape: LayerShape, width: int, module: ModuleLora) -> None:
        for field in ("a", "b", "magnitude", "lora_bias", "bias"):
            _check_weights(f"{module.name}.{field}", getattr(module, field))
        if module.rank > self.max_rank:
            raise AdapterError(
                f"rank {module.rank} > {self.max_rank}: module {module.name!r} has a larger rank "
                f"than the pool's max_rank"
            )
        if not abs(module.scaling) <= FLOAT32_MAX:
            raise AdapterError(
                f"{module.name} has a scaling that is not finite in float32, {module.scaling}"
            )
        check_shape(f"{module.name}.lora_A", module.a, [module.rank, shape.in_features])
        check_shape(f"{module.name}.lora_B", module.b, [width, module.rank])
        for name in ("magnitude", "lora_bias", "bias"):
            value = getattr(module, name)
            if value is not None:
                check_shape(f"{module.name}.{name}", value, [width])

    def _cast(self, module: ModuleLora, part: str, value: Tensor) -> Tensor:
        cast = value.detach().to(device="cpu", dtype=self.dtype)
        if not _is_finite(cast):
            if _is_finite(value):
                largest = float(value.abs().max())
                raise AdapterError(
                    f"{module.name}.{part} has values up to {largest:.3g}, which overflow the "
                    f"pool's dtype {dtype_name(self.dtype)} "
                    f"(largest {torch.finfo(self.dtype).max:.3g})"
                )
            raise AdapterError(f"{module.name}.{part} has NaN or infinity among its values")
        return cast

    def _column_scale(
        self, layer: str, start: int, width: int, module: ModuleLora, magnitude: Tensor
    ) -> Tensor:
        if not self.has_column_scale or self.base_weight is None:
            raise UnsupportedAdapterError(
                f"{module.name} uses DoRA, for which the pool needs base_weight (a function from a "
                f"layer's name to its weight [N, K])"
            )
        weight = self.base_weight(layer).detach()
        shape = self.layers[layer]
        check_shape(f"base_weight({layer!r})", weight, [sum(shape.slices), shape.in_features])
        if not weight.is_floating_point():
            raise UnsupportedAdapterError(
                f"{module.name} uses DoRA, which needs a floating-point base weight, "
                f"got {dtype_name(weight.dtype)}"
            )
        rows = weight[start : start + width]
        return column_scale(rows, module.a, module.b, module.scaling, magnitude)

    def _bias(
        self, layer: str, start: int, width: int, module: ModuleLora, scale: Tensor | None
    ) -> Tensor | None:
        if module.lora_bias is None and module.bias is None:
            return None
        if not self.has_bias:
            raise UnsupportedAdapterError(
                f"{module.name} has a bias of its own, for which the pool needs has_bias=True"
            )
        layer_bias = None
        if module.bias is not None:
            if self.base_bias is None:
                raise UnsupportedAdapterError(
                    f"{module.name} has a trained bias, for which the pool needs base_bias (a "
                    f"function from a layer's name to its bias [N] or None)"
                )
            layer_bias = self.base_bias(layer)
            if layer_bias is not None:
                shape = self.layers[layer]
                check_shape(f"base_bias({layer!r})", layer_bias, [sum(shape.slices)])
                layer_bias = layer_bias[start : start + width]
        return adapter_bias(module.lora_bias, module.scaling, scale, module.bias, layer_bias)


def _check_weights(name: str, value: Tensor | None) -> None:
    """A folder gives dense tensors of real numbers; an Adapter that was built by hand may not."""
    if value is None:
        return
    check_tensor(name, value)
    if value.dtype not in REFERENCE_DTYPES:
        names = ", ".join(map(dtype_name, REFERENCE_DTYPES))
        raise AdapterError(f"{name} must have dtype {names}, got {dtype_name(value.dtype)}")
    if value.device.type == "meta":
        raise AdapterError(f"{name} must have values, got a tensor on the meta device")


def _record(shape: LayerShape, module: ModuleLora) -> IntArray:
    """One record without its pointers."""
    record = np.zeros(ENTRY_FIELDS, dtype=np.int64)
    stored = padded_rank(module.rank)
    record[RANK] = stored
    if stored:
        record[A_STRIDE], record[B_STRIDE] = row_stride(shape.in_features), stored
    record[SCALING] = struct.unpack("<I", struct.pack("<f", module.scaling))[0]
    return record


def _is_finite(value: Tensor) -> bool:
    low, high = torch.aminmax(value)  # one pass and no copy; both are NaN where any value is
    return math.isfinite(low) and math.isfinite(high)


def _finite(module: ModuleLora, part: str, value: Tensor) -> Tensor:
    if not _is_finite(value):
        raise AdapterError(f"the {part} of {module.name} has values that are not finite")
    return value


def _image(layout: Layout, pieces: list[Tensor]) -> Tensor:
    """The pages of an adapter as one tensor."""
    image = torch.zeros(layout.num_pages, layout.page_bytes, dtype=torch.uint8)
    flat: npt.NDArray[np.uint8] = image.numpy().reshape(-1)
    starts = layout.pages * layout.page_bytes + layout.offsets
    for start, piece in zip(starts.tolist(), pieces, strict=True):
        data = piece.contiguous().view(-1).view(torch.uint8).numpy()
        flat[start : start + len(data)] = data
    return image
