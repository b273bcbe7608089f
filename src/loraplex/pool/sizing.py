"""How large the tiers of a pool are, from what the caller asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from loraplex.adapters import LayerShape
from loraplex.checks import FLOAT_DTYPES, check_int, dtype_name
from loraplex.pool.arguments import MAX_INT32
from loraplex.pool.layout import ALIGNMENT, adapter_bytes, choose_page_bytes

TYPICAL_RANK = 16

MAX_ARENA = 2**62
"""More than any device has; what torch can still be asked for."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of a pool's tiers, checked and complete.

    Attributes:
        page_bytes: unit of memory in every tier.
        device_bytes: arena, a multiple of the page.
        host_bytes, disk_bytes: budgets, None for no limit.
    """

    page_bytes: int
    device_bytes: int
    host_bytes: int | None
    disk_bytes: int | None


def choose_sizes(
    layers: Mapping[str, LayerShape],
    *,
    max_adapters: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
    page_bytes: int | None,
    device_bytes: int | float | None,
    host_bytes: int | None,
    disk_bytes: int | None,
    has_disk: bool,
) -> Sizes:
    """Check what was asked for and choose what was not.

    Raises:
        TypeError, ValueError: an argument breaks the rules that :class:`AdapterPool` states.
    """
    check_int("max_adapters", max_adapters, 1, MAX_INT32)
    check_int("max_rank", max_rank, 1, MAX_INT32)
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"dtype must be float32, float16 or bfloat16, got {dtype_name(dtype)}")
    page = _page_bytes(layers, dtype.itemsize, max_rank, page_bytes)
    if device_bytes is None:
        typical = adapter_bytes(layers, min(TYPICAL_RANK, max_rank), dtype.itemsize, page)
        largest = adapter_bytes(layers, max_rank, dtype.itemsize, page)
        arena = max(max_adapters * typical, largest)
    else:
        arena = _arena_bytes(device_bytes, device) // page * page
    if arena < page:
        raise ValueError(f"device_bytes must hold a page of {page} bytes, got {device_bytes}")
    if host_bytes is not None and check_int("host_bytes", host_bytes, 1) < arena:
        raise ValueError(f"host_bytes must be at least the arena's {arena} bytes, got {host_bytes}")
    _check_disk(host_bytes, disk_bytes, has_disk)
    return Sizes(page, arena, host_bytes, disk_bytes)


def check_device(device: object) -> torch.device:
    """The device with its index, ``cuda`` as ``cuda:0``.

    Raises:
        TypeError: no device. ValueError: no such device here, or one without memory.
    """
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device must be a torch.device or its name, got {device!r:.80}")
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used here: {error!s:.200}") from error
    if found.type == "meta":
        raise ValueError("device must have memory, got 'meta'")
    return found


def free_bytes(device: torch.device) -> int:
    """Memory of a device that is free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_disk(host_bytes: int | None, disk_bytes: int | None, has_disk: bool) -> None:
    if has_disk and host_bytes is None:
        raise ValueError("disk_dir needs host_bytes, or nothing would ever go to disk")
    if disk_bytes is not None:
        check_int("disk_bytes", disk_bytes, 1)
        if not has_disk or host_bytes is None:
            raise ValueError(f"disk_bytes needs disk_dir, got disk_bytes={disk_bytes} alone")
        if disk_bytes < host_bytes:
            raise ValueError(
                f"disk_bytes must be at least host_bytes = {host_bytes}, got {disk_bytes}"
            )


def _page_bytes(
    layers: Mapping[str, LayerShape], element_size: int, max_rank: int, asked: int | None
) -> int:
    if asked is None:
        ranks = sorted({min(rank, max_rank) for rank in (8, 16, 32, 64)})
        return choose_page_bytes(layers, element_size, ranks)
    check_int("page_bytes", asked, ALIGNMENT, MAX_INT32)
    if asked % ALIGNMENT:
        raise ValueError(f"page_bytes must be a multiple of {ALIGNMENT}, got {asked}")
    return asked


def _arena_bytes(asked: int | float, device: torch.device) -> int:
    if isinstance(asked, float):
        if not 0.0 < asked <= 1.0:
            raise ValueError(f"device_bytes as a share must be above 0 and at most 1, got {asked}")
        return int(free_bytes(device) * asked)
    return check_int("device_bytes", asked, 1, MAX_ARENA)
