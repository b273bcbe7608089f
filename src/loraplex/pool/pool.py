"""Thousands of adapters by name, a few dozen of them on the device at a time."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType, TracebackType

import torch

from loraplex.adapters import Adapter, LayerLora, LayerShape, match
from loraplex.pool.arguments import check_flag, check_layers, check_options
from loraplex.pool.backing import Backing
from loraplex.pool.device import DeviceTier
from loraplex.pool.disk import DiskTier
from loraplex.pool.host import HostTier
from loraplex.pool.layout import padded_rank
from loraplex.pool.lease import Lease
from loraplex.pool.names import check_name, check_names
from loraplex.pool.pack import LayerTensor, LayerTensorOrNone, Packer
from loraplex.pool.record import Record
from loraplex.pool.report import AdapterInfo, describe, snapshot
from loraplex.pool.roster import Roster
from loraplex.pool.sizing import check_device, choose_sizes
from loraplex.pool.stats import Counters, PoolStats
from loraplex.pool.timeline import Mark, Timeline, timeline_of
from loraplex.table import AdapterTable

LINEAR_FEATURES = ("dora", "lora_bias", "bias")
"""Of ``Adapter.features``, those that live in the layers themselves."""


class AdapterPool:
    """LoRA adapters of one model in device memory, backed by host memory and disk.

    Adapters are registered by name (:meth:`add`) and brought to the device when a step needs them
    (:meth:`acquire`); each takes the bytes of its own ranks. The tables of the layers
    (:meth:`table`) are filled in place, so captured CUDA graphs stay valid as adapters come and go.
    Every method may be called from any thread, and a method that raises leaves the registered
    adapters and their weights as they were.

    Args:
        layers: shape of every layer that an adapter may change, in the order in which they run.
        max_adapters: L, most adapters on the device at a time.
        dtype: dtype of the activations; A and B are cast to it.
        device: where the tables and the arena are.
        max_rank: largest rank that is accepted; kernels are chosen for it.
        device_bytes: size of the arena; a float between 0 and 1 is a share of the free memory. None
            makes room for ``max_adapters`` adapters of rank 16, and for one of ``max_rank``.
        host_bytes: budget of the host tier, None for no limit; not below the arena's size.
        disk_dir: folder in which a disk tier keeps a private folder; None for no disk tier. It is
            for what goes beyond ``host_bytes``.
        disk_bytes: budget of the disk tier, None for no limit; not below ``host_bytes``, since all
            that is registered has its room there.
        base_weight: function from a layer's name to its weight [N, K]; needed for DoRA.
        base_bias: function from a layer's name to its bias [N] or None; needed for adapters that
            replace the layer's bias.
        has_bias: whether the tables provide for biases; None = if ``base_bias`` is given.
        base_model: name of the base model; adding an adapter of another one warns.
        page_bytes: unit of memory; None chooses it for the layers.
        timeline: how copies are ordered with compute; None takes what suits the device.

    Raises:
        TypeError, ValueError: an argument breaks these rules.
        PoolError: the device has no memory for the arena or the tables.

    Example:
        >>> import torch, loraplex as lp
        >>> from loraplex.adapters import LayerShape
        >>> layers = {"o_proj": LayerShape(64, (64,), ("",))}
        >>> pool = lp.AdapterPool(layers, max_adapters=4, dtype=torch.float32, device="cpu")
        >>> pool.names(), pool.table("o_proj").num_adapters
        ([], 4)
    """

    def __init__(
        self,
        layers: Mapping[str, LayerShape],
        *,
        max_adapters: int,
        dtype: torch.dtype,
        device: torch.device | str,
        max_rank: int = 64,
        device_bytes: int | float | None = None,
        host_bytes: int | None = None,
        disk_dir: str | os.PathLike[str] | None = None,
        disk_bytes: int | None = None,
        base_weight: LayerTensor | None = None,
        base_bias: LayerTensorOrNone | None = None,
        has_bias: bool | None = None,
        base_model: str | None = None,
        page_bytes: int | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.layers: Mapping[str, LayerShape] = MappingProxyType(check_layers(layers))
        check_options(
            base_weight=base_weight,
            base_bias=base_bias,
            has_bias=has_bias,
            base_model=base_model,
            disk_dir=disk_dir,
            timeline=timeline,
        )
        self.device = check_device(device)
        self.dtype, self.max_adapters, self.max_rank = dtype, max_adapters, max_rank
        sizes = choose_sizes(
            self.layers,
            max_adapters=max_adapters,
            max_rank=max_rank,
            dtype=dtype,
            device=self.device,
            page_bytes=page_bytes,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            disk_bytes=disk_bytes,
            has_disk=disk_dir is not None,
        )
        self._layer_index = {name: i for i, name in enumerate(self.layers)}
        self._base_model = base_model
        self._packer = Packer(
            self.layers,
            dtype,
            sizes.page_bytes,
            max_rank,
            has_column_scale=base_weight is not None,
            has_bias=base_bias is not None if has_bias is None else has_bias,
            base_weight=base_weight,
            base_bias=base_bias,
        )
        self.timeline = timeline_of(self.device) if timeline is None else timeline
        lock, counters = threading.Condition(), Counters()
        arena = DeviceTier(
            self.layers,
            num_slots=max_adapters,
            num_pages=sizes.device_bytes // sizes.page_bytes,
            page_bytes=sizes.page_bytes,
            device=self.device,
            timeline=self.timeline,
            counters=counters,
        )
        host = HostTier(
            sizes.page_bytes, sizes.host_bytes, self.timeline, segment_bytes=sizes.device_bytes
        )
        disk = None if disk_dir is None else DiskTier(disk_dir, sizes.disk_bytes)
        backing = Backing(lock, host, disk, self.timeline, counters)
        self._roster = Roster(lock, arena, backing, self.timeline, counters)
        self._tables = {name: self._make_table(i, name) for name, i in self._layer_index.items()}
        for memory in (arena.arena, arena.entries):
            self.timeline.adopt(memory)
        self._loader: ThreadPoolExecutor | None = None

    def _make_table(self, index: int, name: str) -> AdapterTable:
        shape, packer = self.layers[name], self._packer
        return AdapterTable.allocate(
            self.max_adapters,
            shape.in_features,
            shape.slices,
            max_rank=padded_rank(self.max_rank),
            dtype=self.dtype,
            device=self.device,
            has_column_scale=packer.has_column_scale,
            has_bias=packer.has_bias,
            rank_multiple=8,
            entries=self._roster.device.entries[:, index, : len(shape.slices)],
            storages=[self._roster.device.arena],
        )

    def table(self, layer: str) -> AdapterTable:
        """The table of one layer; the same object for the life of the pool.

        Raises:
            ValueError: no such layer.
        """
        self.layer_index(layer)
        return self._tables[layer]

    def layer_index(self, layer: str) -> int:
        """Position of a layer among ``layers``.

        Raises:
            ValueError: no such layer.
        """
        if layer not in self._layer_index:
            raise ValueError(
                f"layer must be one of the pool's {len(self.layers)} layers, got {layer!r}"
            )
        return self._layer_index[layer]

    def add(
        self,
        name: str,
        adapter: Adapter,
        *,
        matched: Mapping[str, LayerLora] | None = None,
        replace: bool = False,
        strict: bool = True,
    ) -> None:
        """Register an adapter; its weights are copied, so the adapter may be dropped.

        The work (matching, casting, folding DoRA) happens on the host before anything changes.
        Nothing is put on the device: that is what :meth:`acquire` and :meth:`prefetch` do.

        Args:
            name: a string without control characters, not empty; says nothing of the folder.
            adapter: from ``load_adapter``.
            matched: what of it lands on which layer, from ``match``, for callers that carry the
                rest of it (embeddings, whole modules) themselves. If None it is matched here, and
                such parts are refused.
            replace: take the place of an adapter of that name. Leases keep the old weights until
                they end; whoever acquires the name from now on gets the new ones.
            strict: refuse an adapter of which a part matches no layer.

        Raises:
            TypeError, ValueError: an argument breaks these rules.
            AdapterExistsError: the name is taken and ``replace`` is false.
            AdapterError: the adapter does not fit the layers, ``max_rank`` or ``dtype``.
            UnsupportedAdapterError: it uses a feature this pool was not made for.
            PoolFullError: it is larger than a tier, or no room can be made for it.
        """
        name = check_name(name)
        check_flag("replace", replace)
        check_flag("strict", strict)
        if not isinstance(adapter, Adapter):
            raise TypeError(
                f"adapter must be an Adapter (load_adapter makes one), got {type(adapter).__name__}"
            )
        roster = self._roster
        with roster.lock:
            roster.check_addable(name, replace)
        if matched is None:
            adapter.require(LINEAR_FEATURES)
            base_model = self._base_model
            matched = match(adapter, self.layers, base_model=base_model, strict=strict)
        manifest, image = self._packer.pack(matched)
        roster.check_size(manifest.layout.num_pages)
        record = Record(name, manifest, str(adapter.path or ""), adapter.spec.base_model)
        twin = roster.find_twin(record)
        if twin is not None:
            # Before anything is taken: a filter may turn it into an error.
            warnings.warn(
                f"{name!r} comes from the same folder as {twin!r}: its weights are held twice",
                stacklevel=2,
            )
        pages = roster.backing.store(image)
        try:
            roster.register(record, pages, replace)
        except BaseException:
            roster.backing.abandon(pages, record.num_bytes)
            raise

    def remove(self, name: str) -> None:
        """Forget an adapter: its memory is free at once, or when the last lease on it ends.

        Raises:
            UnknownAdapterError: no adapter of that name.
        """
        self._roster.remove(name)

    def acquire(self, names: Iterable[str | None], *, wait: bool = True) -> Lease:
        """Make adapters resident and keep them so until the lease is released.

        What is not on the device is copied there on a stream of its own, in place of the least
        recently used adapters that no lease holds. The host does not wait for the copies. An
        adapter that is only on disk is read first, on the calling thread.

        Args:
            names: one per request or row, in any order and number; None is the base model.
            wait: let the current stream wait for all of them; if false, call
                :meth:`Lease.wait` before their first use.

        Raises:
            UnknownAdapterError: a name is not registered.
            PoolFullError: the adapters do not fit beside those that other leases hold.
            PoolError: an adapter's file in the disk tier cannot be read.
        """
        wanted = check_names(names)
        check_flag("wait", wait)
        records = self._roster.acquire(wanted)
        lease = Lease(self, wanted, records)
        try:
            lease.expect(self._roster.loading(records.values()))
            if wait:
                lease.wait()
        except BaseException:
            lease.release()
            raise
        return lease

    def prefetch(self, names: Sequence[str]) -> Future[None]:
        """Bring adapters to the device in the background, without keeping them there.

        Returns:
            A future that is done when the copies were started (see :meth:`is_ready`), and that
            holds what :meth:`acquire` would have raised.
        """
        wanted = check_names(names)
        with self._roster.lock:
            self._roster.check_open()
            if self._loader is None:
                self._loader = ThreadPoolExecutor(1, thread_name_prefix="loraplex-pool")
            return self._loader.submit(self._roster.load, wanted, is_pinned=False)

    def is_ready(self, name: str) -> bool:
        """Whether all of an adapter is on the device now, so that acquiring it delays no step.

        Raises:
            UnknownAdapterError: no adapter of that name.
        """
        with self._roster.lock:
            record = self._roster.find(name)
            return record.place is not None and self._roster.device.check_ready(record)

    def pin(self, name: str) -> None:
        """Make an adapter resident and never evict it; a reload keeps the pin.

        Raises:
            UnknownAdapterError, PoolFullError, PoolError: as :meth:`acquire`.
        """
        self._roster.load([check_name(name)], is_pinned=True)

    def unpin(self, name: str) -> None:
        """Let an adapter be evicted again.

        Raises:
            UnknownAdapterError: no adapter of that name.
        """
        self._roster.unpin(name)

    def names(self) -> list[str]:
        """Registered adapters in the order in which they were added."""
        with self._roster.lock:
            return list(self._roster.records)

    def info(self, name: str) -> AdapterInfo:
        """What is known of one adapter.

        Raises:
            UnknownAdapterError: no adapter of that name.
        """
        with self._roster.lock:
            return describe(self._roster.find(name))

    def stats(self) -> PoolStats:
        """Bytes, counts and latencies as of now."""
        with self._roster.lock:
            return snapshot(self._roster)

    def trim(self) -> int:
        """Give host memory that holds nothing back; may stall the device. Returns its bytes."""
        with self._roster.lock:
            return self._roster.backing.host.trim()

    def end_lease(self, records: Collection[Record], use: tuple[Hashable, Mark]) -> None:
        """What :meth:`Lease.release` calls."""
        self._roster.release(records, use)

    def close(self) -> None:
        """Stop background loading and delete the disk tier; the pool cannot be used afterwards.

        Leases that are still out stay valid until they are released.
        """
        with self._roster.lock:
            self._roster.is_closed = True
            loader, self._loader = self._loader, None
        if loader is not None:
            loader.shutdown(cancel_futures=True)
        if self._roster.backing.disk is not None:
            self._roster.backing.disk.close()

    def __contains__(self, name: object) -> bool:
        with self._roster.lock:
            return name in self._roster.records

    def __len__(self) -> int:
        with self._roster.lock:
            return len(self._roster.records)

    def __enter__(self) -> AdapterPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        device = self._roster.device
        return (
            f"AdapterPool({len(self)} adapters, {len(device.resident)} of {self.max_adapters} "
            f"slots, {len(self.layers)} layers, page_bytes={device.arena.shape[1]}, "
            f"device={str(self.device)!r})"
        )
