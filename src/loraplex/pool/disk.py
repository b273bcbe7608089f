"""The disk tier: packed adapters in a private folder, one file each."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from loraplex.errors import PoolError, PoolFullError

HEADER = struct.Struct("<8sQI")
MAGIC = b"loraplx1"


class DiskTier:
    """Files within a budget, in a folder of their own that goes away with the pool.

    The folder is the pool's, made with ``tempfile.mkdtemp`` (mode 0700), so that nothing a user
    does to the adapter's own files reaches weights that were loaded before. A checksum makes sure
    that what is read is what was written.

    Args:
        parent: folder in which to make it.
        budget: bytes, None for no limit.
    """

    def __init__(self, parent: str | os.PathLike[str], budget: int | None) -> None:
        self.budget = budget
        self.num_reserved = 0
        if not os.path.isdir(parent):
            raise ValueError(f"disk_dir must be a folder that exists, got {str(parent)!r}")
        self.folder = Path(tempfile.mkdtemp(prefix="loraplex-pool-", dir=parent))
        self._next = 0
        self._finalizer = weakref.finalize(self, shutil.rmtree, str(self.folder), True)

    def reserve(self, num_bytes: int) -> bool:
        """Claim room for an adapter that may come here one day. Needs the pool's lock."""
        size = num_bytes + HEADER.size
        if self.budget is not None and self.num_reserved + size > self.budget:
            return False
        self.num_reserved += size
        return True

    def unreserve(self, num_bytes: int) -> None:
        """Give the room of an adapter back. Needs the pool's lock."""
        self.num_reserved -= num_bytes + HEADER.size

    def new_path(self) -> Path:
        """A name for a file that does not exist. Needs the pool's lock."""
        self._next += 1
        return self.folder / f"{self._next:08d}.bin"

    def write(self, path: Path, blocks: Sequence[Tensor]) -> None:
        """Write the pages of an adapter; takes its time, so call it without the lock.

        Raises:
            PoolFullError: the disk is full. PoolError: it cannot be written for another reason.
        """
        data = [block.numpy().reshape(-1).data for block in blocks]
        try:
            with path.open("xb") as file:
                file.write(HEADER.pack(MAGIC, sum(map(len, data)), _checksum(data)))
                for block in data:
                    file.write(block)
        except OSError as error:
            kind = PoolFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else PoolError
            raise kind(f"the pool's disk tier cannot write a file: {error.strerror}") from error

    def read(self, path: Path, blocks: Sequence[Tensor]) -> None:
        """Fill pages from a file; takes its time, so call it without the lock.

        Raises:
            PoolError: the file is gone, cut short or changed.
        """
        data = [block.numpy().reshape(-1).data for block in blocks]
        size = sum(map(len, data))
        try:
            with path.open("rb") as file:
                header = file.read(HEADER.size)
                got = sum(file.readinto(block) for block in data)
        except OSError as error:
            raise PoolError(f"the pool's disk tier cannot read a file: {error.strerror}") from error
        if header != HEADER.pack(MAGIC, size, _checksum(data)) or got != size:
            raise PoolError(
                f"a file of the pool's disk tier was changed or cut short (expected {size} bytes)"
            )

    def close(self) -> None:
        """Delete the folder."""
        self._finalizer()


def _checksum(data: Sequence[memoryview]) -> int:
    value = 0
    for block in data:
        value = zlib.crc32(block, value)
    return value
