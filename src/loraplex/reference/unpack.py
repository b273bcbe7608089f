"""The tensors behind the pointers of an adapter table."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SliceLora:
    """One adapter's part in one slice: a [rank, K], b [width, rank], vectors [width] or None."""

    a: Tensor
    b: Tensor
    scaling: float
    column_scale: Tensor | None
    bias: Tensor | None


def unpack_slot(
    records: Sequence[Sequence[int]],
    storages: Sequence[Tensor],
    in_features: int,
    slices: Sequence[int],
    dtype: torch.dtype,
    inner_strides: tuple[int, int],
) -> list[SliceLora]:
    """Views of one slot's tensors, found by address among the tensors that a table keeps."""
    parts = []
    for record, width in zip(records, slices, strict=True):
        a_ptr, a_stride, b_ptr, b_stride, rank, scale_bits, scale_ptr, bias_ptr = record
        shapes = (
            (a_ptr, (rank, in_features), (a_stride, inner_strides[0]), dtype),
            (b_ptr, (width, rank), (b_stride, inner_strides[1]), dtype),
        )
        a, b = (_view(storages, *shape) for shape in shapes)
        vectors = [
            _view(storages, ptr, (width,), (1,), torch.float32) if ptr else None
            for ptr in (scale_ptr, bias_ptr)
        ]
        scaling = struct.unpack("<f", struct.pack("<I", scale_bits & 0xFFFFFFFF))[0]
        parts.append(SliceLora(a, b, scaling, vectors[0], vectors[1]))
    return parts


def _view(
    storages: Sequence[Tensor],
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    if 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=storages[0].device if storages else None)
    reach = sum(step * (size - 1) for step, size in zip(strides, shape, strict=True)) + 1
    for storage in storages:
        memory = storage.untyped_storage()
        offset = pointer - memory.data_ptr()
        if offset >= 0 and offset + reach * dtype.itemsize <= memory.nbytes():
            flat = torch.empty(0, dtype=dtype, device=storage.device)
            return flat.set_(memory, offset // dtype.itemsize, shape, strides)
    raise ValueError("table.entries must point into the tensors that the table keeps alive")
