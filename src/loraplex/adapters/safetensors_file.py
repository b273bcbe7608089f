"""Reads safetensors files into private memory, one pass and no mapping.

The safetensors package maps files or copies twice. A mapped file that is cut while it is used ends
the process (SIGBUS) and one that is overwritten changes weights that were checked; a second copy
doubles memory and time. So every byte is read once, straight into its tensor.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

import torch

from loraplex.errors import AdapterError, UnsupportedAdapterError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_ELEMENTS = 1 << 48
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

LFS_MAGIC = b"version https://git-lfs.github.com/spec/"
ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True)
class Entry:
    """One tensor of the header; offsets count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_safetensors(file: BufferedReader, size: int, where: str) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file of `size` bytes; `where` begins every message.

    Raises:
        AdapterError: not a safetensors file, truncated, or with a header that contradicts itself.
        UnsupportedAdapterError: a dtype that torch does not have.
    """
    header_size, header = _read_header(file, size, where)
    entries = _parse_header(header, where)
    expected = 8 + header_size + (entries[-1].end if entries else 0)
    if size < expected:
        raise AdapterError(f"{where} is truncated: {size} bytes, its header promises {expected}")
    if size > expected:
        raise AdapterError(f"{where} is corrupt: {size - expected} bytes after the last tensor")
    tensors: dict[str, torch.Tensor] = {}
    for entry in entries:
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        if tensor.numel():
            buffer: Any = tensor.view(-1).view(torch.uint8).numpy()
            read = file.readinto(buffer)
            if read != entry.end - entry.begin:
                raise AdapterError(f"{where} was truncated while it was read")
        tensors[entry.name] = tensor
    return tensors


def _read_header(file: BufferedReader, size: int, where: str) -> tuple[int, bytes]:
    start = file.read(max(9, len(LFS_MAGIC)))
    if start.startswith(LFS_MAGIC):
        raise lfs_error(where)
    if len(start) >= 9 and start[8:9] != b"{":
        if start.startswith((ZIP_MAGIC, *PICKLE_MAGIC)):
            raise AdapterError(f"{where} holds a torch.save file (a pickle), not safetensors")
        raise AdapterError(f"{where} is no safetensors file (no JSON header)")
    header_size = int.from_bytes(start[:8], "little")
    if len(start) < 9 or size < 8 + header_size:
        raise AdapterError(f"{where} is truncated: {size} bytes end inside its header")
    if header_size > MAX_HEADER_BYTES:
        raise AdapterError(f"{where} has a corrupt header of {header_size} bytes")
    file.seek(8)
    return header_size, file.read(header_size)


def _parse_header(header: bytes, where: str) -> list[Entry]:
    """The entries in the order of their bytes, which have to follow one another."""
    try:
        items: dict[str, Any] = json.loads(header.decode("utf-8"), object_pairs_hook=_distinct)
        items.pop("__metadata__", None)
        entries = sorted((_entry(*item) for item in items.items()), key=lambda e: (e.begin, e.end))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise AdapterError(f"{where} has a corrupt header: {error!s:.200}") from None
    end = 0
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise UnsupportedAdapterError(
                f"{where}: {entry.name:.200} has dtype {entry.dtype:.40}, "
                f"known are {', '.join(DTYPES)}"
            )
        num_bytes = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        if entry.begin != end or entry.end - entry.begin != num_bytes:
            raise AdapterError(
                f"{where} has a corrupt header: {entry.name:.200} of shape {entry.shape} and dtype "
                f"{entry.dtype} takes {num_bytes} bytes from {end}, not {entry.begin}:{entry.end}"
            )
        end = entry.end
    return entries


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) != len(pairs):
        raise ValueError("a name occurs twice")
    return items


def _entry(name: str, fields: Any) -> Entry:
    shape, (begin, end) = tuple(fields["shape"]), fields["data_offsets"]
    if not isinstance(fields["dtype"], str):
        raise TypeError(f"dtype of {name!r:.80} is no string")
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"sizes of {name!r:.80} must be integers from 0")
    if math.prod(number or 1 for number in shape) > MAX_ELEMENTS:
        raise ValueError(f"{name!r:.80} is too large")
    return Entry(name, fields["dtype"], shape, begin, end)


def lfs_error(where: str) -> AdapterError:
    """The file is a pointer of Git LFS."""
    return AdapterError(
        f"{where} looks like an LFS pointer, not the file itself; fetch it with git lfs pull"
    )
