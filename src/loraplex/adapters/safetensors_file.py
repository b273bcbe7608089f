"""Reads safetensors files into private memory, never through a mapping.

A mapped file that is cut while it is used ends the process (SIGBUS), and one that is overwritten
changes weights that were checked. So the file is read once, and the safetensors package parses the
bytes; this module adds what a user wants to hear about a file that is something else.
"""

from __future__ import annotations

from io import BufferedReader

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from loraplex.errors import AdapterError, UnsupportedAdapterError

LFS_MAGIC = b"version https://git-lfs.github.com/spec/"
ZIP_MAGIC = b"PK\x03\x04"
PICKLE_MAGIC = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def read_safetensors(file: BufferedReader, size: int, where: str) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file of `size` bytes; `where` begins every message.

    Raises:
        AdapterError: not a safetensors file, truncated, or with a header that contradicts itself.
        UnsupportedAdapterError: a dtype that torch does not have.
    """
    data = file.read()
    if len(data) < size:
        raise AdapterError(f"{where} was truncated while it was read")
    _check_kind(data, where)
    try:
        tensors: dict[str, torch.Tensor] = load(data)
    except (SafetensorError, ValueError, AssertionError, RuntimeError, KeyError) as error:
        if "unknown variant" in str(error) or isinstance(error, KeyError):
            raise UnsupportedAdapterError(f"{where}: no torch dtype for {error!s:.200}") from None
        raise AdapterError(f"{where} is corrupt or truncated: {error!s:.200}") from None
    return tensors


def _check_kind(data: bytes, where: str) -> None:
    if data.startswith(LFS_MAGIC):
        raise lfs_error(where)
    if data[8:9] not in (b"{", b""):
        if data.startswith((ZIP_MAGIC, *PICKLE_MAGIC)):
            raise AdapterError(f"{where} holds a torch.save file (a pickle), not safetensors")
        raise AdapterError(f"{where} is no safetensors file (no JSON header)")
    header_size = int.from_bytes(data[:8], "little")
    if len(data) < 9 or len(data) < 8 + header_size:
        raise AdapterError(f"{where} is truncated: {len(data)} bytes end inside its header")


def lfs_error(where: str) -> AdapterError:
    """The file is a pointer of Git LFS."""
    return AdapterError(
        f"{where} looks like an LFS pointer, not the file itself; fetch it with git lfs pull"
    )
