"""What a pool knows of one version of one adapter."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

from loraplex.pool.pack import Manifest
from loraplex.pool.pages import IntArray
from loraplex.pool.timeline import Mark


@dataclass(frozen=True, slots=True)
class Room:
    """Where an adapter will be on the device: a slot, and pages of the arena in its own order."""

    slot: int
    pages: IntArray


@dataclass(eq=False, slots=True)
class Placement:
    """Where an adapter is on the device, and how far it has arrived.

    Attributes:
        slot: index that tokens use.
        pages: its pages in the arena.
        start: when its copy began.
        arrivals: marks of the copy stream in order: the table entries, then groups of pages.
        layer_arrivals: [layers] which of the arrivals a layer has to wait for.
        is_ready: all arrivals are known to be past.
    """

    slot: int
    pages: IntArray
    start: Mark
    arrivals: list[Mark]
    layer_arrivals: IntArray
    is_ready: bool = False


@dataclass(eq=False, slots=True)
class Record:
    """One version of one adapter; a reload under the same name makes a new one.

    Attributes:
        name: as registered.
        manifest: layout and table records.
        source: folder it came from, "" if unknown.
        base_model: what it was trained on, as far as it says.
        host: its pages in host memory, if it is there.
        file: its file in the disk tier, if it is there.
        place: where it is on the device, if it is there.
        users: leases that hold it; while there are any it stays on the device.
        comers: calls that load it, or others beside it; as good as users while they do.
        holds: operations that need a copy of it to stay, in host memory or on disk.
        keeps: operations that need its host pages to stay; they hold it as well.
        is_pinned: never evicted, used or not.
        is_retired: removed or replaced; goes away with its last user.
        is_staging: a thread is reading it from disk.
        room: what is set aside for it on the device while a thread issues its copies.
        last_copy: end of the last copy out of its host pages.
        last_use: end of the work that used it, per stream.
    """

    name: str
    manifest: Manifest
    source: str = ""
    base_model: str | None = None
    host: IntArray | None = None
    file: Path | None = None
    place: Placement | None = None
    users: int = 0
    comers: int = 0
    holds: int = 0
    keeps: int = 0
    is_pinned: bool = False
    is_retired: bool = False
    is_staging: bool = False
    room: Room | None = None
    last_copy: Mark | None = None
    last_use: dict[Hashable, Mark] = field(default_factory=dict)

    @property
    def is_loading(self) -> bool:
        """Whether a thread is issuing its copies to the device, as one of its comers."""
        return self.room is not None

    @property
    def is_used(self) -> bool:
        """Whether it has to stay on the device."""
        return self.users > 0 or self.comers > 0

    @property
    def num_pages(self) -> int:
        """Pages it takes in any tier."""
        return self.manifest.layout.num_pages

    @property
    def num_bytes(self) -> int:
        """Bytes it takes in any tier."""
        return self.manifest.layout.num_bytes
