"""Adapter folders on disk: which file, read how, refused why."""

from __future__ import annotations

import json
import os
import stat
import zipfile
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

import torch

from loraplex.adapters.safetensors_file import LFS_MAGIC, lfs_error, read_safetensors
from loraplex.errors import AdapterError

CONFIG_NAME = "adapter_config.json"
SAFETENSORS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"
MAX_CONFIG_BYTES = 16 << 20
# What other trainers put beside PEFT's file: embeddings of added tokens (read by older engines),
# and LongLoRA's embeddings and norms.
FURTHER_WEIGHTS = ("new_embeddings.safetensors", "new_embeddings.bin", "trainable_params.bin")


@dataclass(frozen=True)
class AdapterFolder:
    """A folder that exists; `label` is what messages call it, `root` the only place it may read."""

    label: str
    path: str
    root: str | None = None

    def read_config(self) -> dict[str, Any]:
        """The parsed adapter_config.json.

        Raises:
            AdapterError: missing, too large, not UTF-8, not JSON, or no JSON object.
        """
        if not os.path.lexists(os.path.join(self.path, CONFIG_NAME)):
            raise AdapterError(
                f"{self.label}: not a PEFT adapter folder: no {CONFIG_NAME}{self._hint()}"
            )
        data = self._read(CONFIG_NAME, limit=MAX_CONFIG_BYTES)
        if data.startswith(LFS_MAGIC):
            raise lfs_error(f"{self.label}: {CONFIG_NAME}")
        try:
            config = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise AdapterError(f"{self.label}: {CONFIG_NAME} is no valid JSON: {error}") from None
        if not isinstance(config, dict):
            raise AdapterError(
                f"{self.label}: {CONFIG_NAME} must hold a JSON object, got {config!r:.80}"
            )
        return config

    def read_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, in private memory: later changes of the file cannot reach them.

        Raises:
            AdapterError: no weights, or a file that is truncated, foreign or corrupt.
        """
        if os.path.lexists(os.path.join(self.path, SAFETENSORS_NAME)):
            return self._read_safetensors()
        if os.path.lexists(os.path.join(self.path, PICKLE_NAME)):
            return self._read_pickle()
        raise AdapterError(
            f"{self.label}: no {SAFETENSORS_NAME} and no {PICKLE_NAME}{self._hint()}"
        )

    def further_weights(self) -> tuple[str, ...]:
        """Files with trained weights that PEFT knows nothing of."""
        return tuple(
            name for name in FURTHER_WEIGHTS if os.path.lexists(os.path.join(self.path, name))
        )

    def _read_safetensors(self) -> dict[str, torch.Tensor]:
        with self._open(self._contained(SAFETENSORS_NAME), SAFETENSORS_NAME) as file:
            size = self._weights_size(file, SAFETENSORS_NAME)
            return read_safetensors(file, size, f"{self.label}: {SAFETENSORS_NAME}")

    def _read_pickle(self) -> dict[str, torch.Tensor]:
        path = self._contained(PICKLE_NAME)
        with self._open(path, PICKLE_NAME) as file:
            size = self._weights_size(file, PICKLE_NAME)
            if file.read(len(LFS_MAGIC)) == LFS_MAGIC:
                raise lfs_error(f"{self.label}: {PICKLE_NAME}")
            file.seek(0)
            try:
                _check_archive(file)
                loaded = torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:
                reason = str(error).strip().split("\n")[0]
                raise AdapterError(
                    f"{self.label}: {PICKLE_NAME} cannot be read by weights-only loading (it is "
                    f"damaged, or holds more than tensors): {reason:.300}"
                ) from None
        if not isinstance(loaded, dict):
            raise AdapterError(
                f"{self.label}: {PICKLE_NAME} must hold a dict of tensors, "
                f"got {type(loaded).__name__}"
            )
        return {key: self._private(key, value, size) for key, value in loaded.items()}

    def _private(self, key: object, value: object, file_size: int) -> torch.Tensor:
        """A dense CPU tensor that shares no storage with others."""
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise AdapterError(
                f"{self.label}: {PICKLE_NAME} must map names to tensors, "
                f"got {key!r:.80}: {type(value).__name__}"
            )
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise AdapterError(f"{self.label}: {PICKLE_NAME}: {key!r:.200} is not a dense tensor")
        # An expanded view claims more than it stores; copying it would be a memory bomb.
        if value.numel() * value.element_size() > file_size:
            raise AdapterError(
                f"{self.label}: {PICKLE_NAME}: {key!r:.200} claims shape {tuple(value.shape)}, "
                f"more than the file's {file_size} bytes"
            )
        return value.detach().clone(memory_format=torch.contiguous_format)

    def _weights_size(self, file: BufferedReader, name: str) -> int:
        """Bytes of a file that is about to be read whole; a sparse one may claim any size."""
        size = os.fstat(file.fileno()).st_size
        memory = physical_memory()
        if size > memory:
            raise AdapterError(
                f"{self.label}: {name} has {size} bytes, "
                f"more than this machine's {memory} of memory"
            )
        return size

    def _contained(self, name: str) -> str:
        path = os.path.realpath(os.path.join(self.path, name))
        if self.root is not None and not _is_inside(path, self.root):
            raise AdapterError(f"{self.label}: {name} leads outside the allowed root")
        return path

    def _open(self, path: str, name: str) -> BufferedReader:
        """Open without blocking on a FIFO, and only a regular file."""
        try:
            # the path is resolved, so a link here was put in its place just now
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            raise AdapterError(f"{self.label}: cannot open {name}: {error.strerror}") from None
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise AdapterError(f"{self.label}: {name} is not a regular file")
        return os.fdopen(handle, "rb")

    def _read(self, name: str, limit: int | None = None) -> bytes:
        with self._open(self._contained(name), name) as file:
            size = os.fstat(file.fileno()).st_size
            if limit is not None and size > limit:
                raise AdapterError(f"{self.label}: {name} has {size} bytes, more than {limit}")
            return file.read()

    def _hint(self) -> str:
        """What is there instead; nothing under a root, where names may belong to others."""
        if self.root is not None:
            return ""
        try:
            names = sorted(os.listdir(self.path))
        except OSError:
            return ""
        inner = [n for n in names if os.path.isfile(os.path.join(self.path, n, CONFIG_NAME))]
        if inner:
            return f"; there is one in the sub-folder {', '.join(inner[:5])}"
        return f"; the folder holds {', '.join(names[:8]) or 'nothing'}"


def open_folder(
    path: str | os.PathLike[str], root: str | os.PathLike[str] | None = None
) -> AdapterFolder:
    """Find an adapter folder; with `root`, `path` is relative to it and must stay inside it.

    Raises:
        TypeError: path is no string or PathLike.
        ValueError: root is empty, which would be the current folder.
        AdapterError: no such folder, or outside `root`; then the message has no paths in it.
    """
    if root is not None and not os.fspath(root):
        raise ValueError(f"root must be a folder, got {root!r}")
    asked = os.fspath(path)
    if not isinstance(asked, str):
        raise TypeError(f"path must be a str or PathLike[str], got {asked!r:.80}")
    label = asked if root is None else f"adapter {asked[:80]!r}"
    base = None if root is None else os.path.realpath(root)
    if "\0" in asked or not asked or not _is_encodable(asked):
        raise AdapterError(
            f"path must be a non-empty path without NUL or half a character, got {asked[:80]!r}"
        )
    found = os.path.realpath(asked if base is None else os.path.join(base, asked))
    if base is not None and not _is_inside(found, base):
        raise AdapterError(f"{label}: not inside the allowed root")
    if not _is_folder(found):
        what = "a file, not a folder" if os.path.isfile(found) else "no such folder"
        advice = " (loraplex downloads nothing)" if root is None else ""
        raise AdapterError(f"{label[:300]}: {what}{advice}")
    return AdapterFolder(label, found, base)


def physical_memory() -> int:
    """Bytes of memory in this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_archive(file: BufferedReader) -> None:
    """torch.save never compresses, so what does is made to unpack to more than it shows.

    Raises:
        ValueError, zipfile.BadZipFile: a compressed entry, or a damaged archive.
    """
    if zipfile.is_zipfile(file):
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("it is a compressed archive, which torch.save never writes")
    file.seek(0)


def _is_encodable(path: str) -> bool:
    """JSON can spell half of a surrogate pair, which no file system takes."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):  # too long, a loop of links, no permission
        return False


def _is_inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)
