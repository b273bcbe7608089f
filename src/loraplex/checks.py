"""Argument checks, one per contract, shared by ops, routing, tables and pools."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REFERENCE_DTYPES = (*FLOAT_DTYPES, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float16`` as ``float16``."""
    return str(dtype).removeprefix("torch.")


def check_tensor(name: str, value: object) -> Tensor:
    """Require a tensor and return it."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    return value


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Require one of the allowed dtypes."""
    if tensor.dtype not in allowed:
        names = ", ".join(dtype_name(d) for d in allowed)
        raise TypeError(f"{name} must have dtype {names}, got {dtype_name(tensor.dtype)}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int | str]) -> None:
    """Require a shape; a string stands for any size and names the axis in the message."""
    fits = tensor.dim() == len(shape) and all(
        isinstance(want, str) or want == have
        for want, have in zip(shape, tensor.shape, strict=False)
    )
    if not fits:
        wanted = ", ".join(str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {tuple(tensor.shape)}")


def check_same(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Require the dtype and device of another tensor."""
    if tensor.dtype != other.dtype:
        raise TypeError(
            f"{name} must have the dtype of {other_name} ({dtype_name(other.dtype)}), "
            f"got {dtype_name(tensor.dtype)}"
        )
    check_device(name, tensor, other_name, other.device)


def check_device(name: str, tensor: Tensor, other_name: str, device: torch.device) -> None:
    """Require the device of another object."""
    if tensor.device != device:
        raise ValueError(
            f"{name} must be on the device of {other_name} ({device}), got {tensor.device}"
        )


def check_int(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """Require a whole number within bounds and return it as int."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < minimum or (maximum is not None and value > maximum):
        bound = f">= {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"{name} must be {bound}, got {value}")
    return value


def check_index_range(name: str, indices: Tensor, num_adapters: int) -> None:
    """Require every index to be -1 or a slot; reads the values, so a GPU tensor synchronises."""
    if indices.numel() == 0:
        return
    low, high = (int(v) for v in torch.aminmax(indices))
    if low < -1 or high >= num_adapters:
        bad = low if low < -1 else high
        raise ValueError(
            f"{name} must lie between -1 (base only) and num_adapters - 1 = {num_adapters - 1}, "
            f"got {bad}"
        )


def check_no_overlap(name: str, tensor: Tensor) -> None:
    """Require that no two elements of a tensor that will be written share memory."""
    spans = sorted(
        (abs(step), size) for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    reach = 0
    for step, size in spans:
        if size > 1:
            if step <= reach:
                raise ValueError(
                    f"{name} must not overlap itself, got shape {tuple(tensor.shape)} "
                    f"with strides {tensor.stride()}"
                )
            reach += step * (size - 1)


def memory_span(tensor: Tensor) -> tuple[int, int]:
    """First byte and first byte past the end of the memory a tensor can touch."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return start, start + (last + 1) * tensor.element_size()


def check_disjoint(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Require that a tensor to be written shares no memory with an input."""
    if tensor.device != other.device:
        return
    first, last = memory_span(tensor)
    other_first, other_last = memory_span(other)
    if first < other_last and other_first < last:
        raise ValueError(f"{name} must not share memory with {other_name}")
