"""Argument checks, one per contract, shared by ops, routing, tables and pools."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
REFERENCE_DTYPES = (*FLOAT_DTYPES, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float16`` as ``float16``."""
    return str(dtype).removeprefix("torch.")


def check_tensor(name: str, value: object) -> Tensor:
    """Require a tensor with strides, no sparse or opaque one, and return it."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must have layout torch.strided, got {value.layout}")
    return value


def check_tensors(name: str, value: object) -> list[Tensor]:
    """Require a sequence of tensors and return it as a list."""
    if not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a sequence of tensors, got {type(value).__name__}")
    return [check_tensor(f"{name}[{number}]", tensor) for number, tensor in enumerate(value)]


def check_memory(name: str, tensor: Tensor) -> None:
    """Require that memory holds the values themselves, for who reads it through a pointer."""
    if tensor.is_neg():
        raise ValueError(
            f"{name} must hold its values in memory, got a view that torch negates when it reads "
            f"it; {name}.resolve_neg() has them"
        )


def check_usable_device(name: str, value: object) -> torch.device:
    """Require a device that torch can use here and return it as tensors on it name it."""
    if not isinstance(value, str | int | torch.device) or isinstance(value, bool):
        raise TypeError(f"{name} must be a torch.device or its name, got {value!r}")
    try:
        # ``cuda`` is ``cuda:0`` on a tensor
        return torch.empty(0, device=value).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(f"{name} must be usable here, got {str(value)!r}: {reason}") from None


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


def check_number(name: str, value: object) -> float:
    """Require a finite number that float32 can hold and return it as float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number = float(value)
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name} must be finite in float32, got {number}")
    return number


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
    check_memory(name, tensor)
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


def is_between_rows(tensor: Tensor, other: Tensor) -> bool:
    """Whether the rows of two matrices take turns in memory, as columns of one buffer do."""
    if tensor.dim() != 2 or other.dim() != 2:
        return False
    step = tensor.stride(0) * tensor.element_size()
    if step <= 0 or step != other.stride(0) * other.element_size():
        return False
    width, other_width = (
        ((t.shape[1] - 1) * t.stride(1) + 1) * t.element_size() for t in (tensor, other)
    )
    gap = (other.data_ptr() - tensor.data_ptr()) % step
    return width <= gap and gap + other_width <= step


def check_disjoint(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Require that a tensor to be written shares no memory with an input."""
    if tensor.device != other.device:
        return
    first, last = memory_span(tensor)
    other_first, other_last = memory_span(other)
    is_shared = first < other_last and other_first < last and not is_between_rows(tensor, other)
    # tensors of the meta device and of torch's tracers have no memory: their storage is at 0
    if is_shared and tensor.untyped_storage().data_ptr():
        raise ValueError(f"{name} must not share memory with {other_name}")


class Spans:
    """The memory of some tensors, to be asked quickly whether another lies clear of all of it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._ends: dict[torch.device, tuple[list[int], list[int]]] = {}
        for device in {tensor.device for tensor in tensors}:
            firsts: list[int] = []
            lasts: list[int] = []
            for first, last in sorted(memory_span(t) for t in tensors if t.device == device):
                if lasts and first <= lasts[-1]:
                    lasts[-1] = max(lasts[-1], last)
                else:
                    firsts.append(first)
                    lasts.append(last)
            self._ends[device] = firsts, lasts

    def is_clear(self, tensor: Tensor) -> bool:
        """Whether no byte between a tensor's first and last is also between one of theirs."""
        if tensor.device not in self._ends:
            return True
        firsts, lasts = self._ends[tensor.device]
        first, last = memory_span(tensor)
        place = bisect_left(firsts, last)
        return place == 0 or lasts[place - 1] <= first


def check_slices(slices: Sequence[int] | None, out_features: int | None) -> tuple[int, ...]:
    """Require widths of at least 1 that sum to N where N is known; one of width N if None."""
    if slices is None and out_features is not None:
        slices = (out_features,)
    if not isinstance(slices, Sequence):
        raise TypeError(f"slices must be a sequence of ints, got {slices!r}")
    widths = tuple(check_int(f"slices[{s}]", width, 1) for s, width in enumerate(slices))
    if out_features is not None and sum(widths) != out_features:
        raise ValueError(f"slices must sum to N = {out_features}, got {widths}")
    if not widths:
        raise ValueError("slices must have at least one width, got ()")
    return widths


def check_per_slice(name: str, value: object, count: int) -> None:
    """Require a sequence with one element per slice."""
    if not isinstance(value, Sequence):
        raise TypeError(
            f"{name} must be a sequence with one element per slice, got {type(value).__name__}"
        )
    if len(value) != count:
        raise ValueError(f"{name} must have one element per slice ({count}), got {len(value)}")


def check_rank_multiple(rank_multiple: int) -> int:
    """Require what a table can promise about its ranks."""
    if check_int("rank_multiple", rank_multiple, 1) not in (1, 8):
        raise ValueError(f"rank_multiple must be 1 or 8, got {rank_multiple}")
    return rank_multiple


def check_rows(name: str, value: Tensor, rows: int, columns: int, device: torch.device) -> None:
    """Require float32 rows on the device of ``a_pool``, each dense."""
    check_dtype(name, check_tensor(name, value), (torch.float32,))
    check_shape(name, value, [rows, columns])
    check_device(name, value, "a_pool", device)
    check_memory(name, value)
    if columns > 1 and value.stride(1) != 1:
        raise ValueError(f"{name} must be dense in its last axis, got strides {value.stride()}")


def number_tensor(name: str, value: object, dtype: torch.dtype) -> Tensor | None:
    """Numbers as a tensor: a tensor stays where it is, a sequence goes to host memory.

    Args:
        dtype: what an empty sequence gets; others get what their numbers are.
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        return check_tensor(name, value)
    if not isinstance(value, Sequence) or any(
        isinstance(v, bool) or not isinstance(v, int | float) for v in value
    ):
        raise TypeError(f"{name} must be a tensor or a sequence of numbers, got {value!r}")
    try:
        return torch.tensor(value) if value else torch.tensor([], dtype=dtype)
    except (ValueError, RuntimeError, OverflowError):
        raise ValueError(f"{name} must fit {dtype_name(dtype)}, got {value!r}") from None


def check_per_slot(
    name: str,
    value: object,
    num_adapters: int,
    default: float,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[list[int] | None, Tensor]:
    """A vector over slots on the device, and whole numbers as a list if that waits for no GPU."""
    given = number_tensor(name, value, dtype)
    if given is None:
        row = torch.full((num_adapters,), default, dtype=dtype, device=device)
        return None if dtype.is_floating_point else [int(default)] * num_adapters, row
    check_shape(name, given, [num_adapters])
    if given.is_floating_point() != dtype.is_floating_point or given.dtype == torch.bool:
        raise TypeError(
            f"{name} must have a dtype like {dtype_name(dtype)}, got {dtype_name(given.dtype)}"
        )
    if given.device.type != "cpu":
        check_device(name, given, "a_pool", device)
        return None, given.to(dtype)
    numbers = None if dtype.is_floating_point else [int(v) for v in given.tolist()]
    return numbers, given.to(device=device, dtype=dtype)


def rank_multiple_of(a_pool: Tensor, b_pool: Tensor, max_rank: int, ranks: Sequence[int]) -> int:
    """The largest ``rank_multiple`` that two pools and their ranks keep."""
    is_dense = a_pool.stride(2) == 1 and b_pool.stride(2) == 1
    is_wide = max_rank % 8 == 0 and a_pool.shape[2] % 8 == 0 and all(r % 8 == 0 for r in ranks)
    return 8 if is_dense and is_wide and is_aligned(a_pool) and is_aligned(b_pool) else 1


def settle_rank_multiple(wanted: int | None, fitting: int) -> int:
    """What a table promises about its ranks: what is wanted, if pools and ranks keep it."""
    if wanted is None:
        return fitting
    if check_rank_multiple(wanted) > fitting:
        raise ValueError(
            "rank_multiple must be 1 unless all ranks and R_max are multiples of 8 and the "
            "rows of both pools are dense and 16-byte aligned, got 8"
        )
    return wanted


def is_aligned(tensor: Tensor) -> bool:
    """Whether every row of a dense-rowed tensor starts on 16 bytes."""
    steps = [
        step for step, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1
    ]
    return tensor.data_ptr() % 16 == 0 and all(
        step * tensor.element_size() % 16 == 0 for step in steps
    )
