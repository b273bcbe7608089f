"""What every slot of SGLang's pools holds: the tables of all layers, changed together in place.

SGLang keeps, per layer, A as [L, S*R_max, K] and B as [L, N, R_max]. An adapter of rank r lies in
the columns 0..r of B, but its slices in A follow each other without a gap: slice s in the rows
s*r .. (s+1)*r. So an entry's pointer into A depends on the rank of the adapter in the slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.checks import is_aligned
from loraplex.table import (
    A_PTR,
    A_STRIDE,
    B_PTR,
    B_STRIDE,
    ENTRY_FIELDS,
    RANK,
    SCALING,
    AdapterTable,
)

PAGE_ROWS = 4096
WHOLE = 8


@dataclass(frozen=True)
class Pools:
    """The pools of one layer, A packed by live rank."""

    a: Tensor
    b: Tensor
    slices: tuple[int, ...]

    @property
    def max_rank(self) -> int:
        """R_max."""
        return self.b.shape[2]

    @property
    def rank_multiple(self) -> int:
        """8 where whole vectors can be loaded once the rest of a vector past a rank is zero."""
        is_wide = self.max_rank % WHOLE == 0 and self.a.shape[2] % WHOLE == 0
        return WHOLE if is_wide and is_aligned(self.a) and is_aligned(self.b) else 1

    def clear_past(self, slot: int, rank: int) -> None:
        """Zero what lies between a rank and the next multiple of eight.

        Nothing of SGLang reads it. A's rows of the other slices stay; their products meet zeros of
        B. What an earlier adapter left past the last slice may not be finite, so it goes too.
        """
        whole = _whole(rank)
        if whole == rank or self.rank_multiple != WHOLE:
            return
        count = len(self.slices)
        self.b[slot, :, rank:whole].zero_()
        self.a[slot, count * rank : (count - 1) * rank + whole].zero_()


class _Page:
    """Entries of many tables in one tensor, with what they are computed from."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.entries = torch.zeros((rows, ENTRY_FIELDS), dtype=torch.int64, device=device)
        # slot, A of the slot, bytes from one rank to the next, whether ranks are made whole
        self.sources = torch.zeros((4, rows), dtype=torch.int64, device=device)
        self.used = 0

    def refresh(self, state: Tensor, start: int = 0) -> None:
        """Write pointers, ranks and scalings from the state [3, L] of the slots."""
        slot, a_base, a_step, is_whole = self.sources[:, start : self.used]
        live, whole, scaling = state[:, slot]
        rows = self.entries[start : self.used]
        rows[:, A_PTR] = a_base + a_step * live
        rows[:, RANK] = torch.where(is_whole > 0, whole, live)
        rows[:, SCALING] = scaling


class SlotBook:
    """Rank and scaling of every slot, and the tables of all layers that follow them.

    Entries keep their addresses, so captured CUDA graphs see every change. Nothing here waits for
    the device.

    Args:
        num_slots: L, SGLang's ``max_loras_per_batch``.
        device: where the pools are.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.device = device
        self._ranks = [0] * num_slots
        self._scalings = [0.0] * num_slots
        self._clean: dict[int, int] = {}
        self._layers: list[Pools] = []
        self._pages: list[_Page] = []
        # live rank, rank made whole, bits of the scaling
        self._state = torch.zeros((3, num_slots), dtype=torch.int64, device=device)

    def add(self, pools: Pools) -> AdapterTable:
        """The table of one more layer, holding what the slots hold now."""
        # SGLang may be in inference mode now and not when it changes adapters
        with torch.inference_mode(False):
            table = self._new_table(pools)
        self._layers.append(pools)
        for slot, rank in self._clean.items():
            pools.clear_past(slot, rank)
        return table

    def remove(self, pools: Pools) -> None:
        """Forget a layer whose pools were replaced; its entries stay where graphs may read them."""
        self._layers = [layer for layer in self._layers if layer is not pools]

    def update(self, slots: Iterable[int], ranks: Sequence[int], scalings: Sequence[float]) -> None:
        """Take over the adapters of a step.

        Args:
            slots: slots that the step's rows use; the others stay as they are.
            ranks, scalings: of all slots; rank 0 is a slot for base rows.
        """
        is_changed = False
        for slot in slots:
            rank, scaling = int(ranks[slot]), float(scalings[slot])
            if rank == 0:
                continue
            if self._clean.get(slot) != rank:
                for layer in self._layers:
                    layer.clear_past(slot, rank)
                self._clean[slot] = rank
            if (self._ranks[slot], self._scalings[slot]) != (rank, scaling):
                self._ranks[slot], self._scalings[slot] = rank, scaling
                is_changed = True
        if is_changed:
            self._write()

    def renew(self, slots: Iterable[int]) -> None:
        """Note that SGLang has put something else into these slots."""
        for slot in slots:
            self._clean.pop(slot, None)

    def _new_table(self, pools: Pools) -> AdapterTable:
        count = self.num_slots * len(pools.slices)
        if not self._pages or self._pages[-1].used + count > len(self._pages[-1].entries):
            self._pages.append(_Page(max(PAGE_ROWS, count), self.device))
        page, start = self._pages[-1], self._pages[-1].used
        page.used += count
        table = AdapterTable.allocate(
            self.num_slots,
            pools.a.shape[2],
            pools.slices,
            max_rank=pools.max_rank,
            dtype=pools.a.dtype,
            device=self.device,
            rank_multiple=pools.rank_multiple,
            entries=page.entries[start : page.used].view(self.num_slots, -1, ENTRY_FIELDS),
            storages=[pools.a, pools.b],
        )
        entries, sources = _constants(pools)
        page.entries[start : page.used] = entries.to(self.device)
        page.sources[:, start : page.used] = sources.to(self.device)
        page.refresh(self._state, start)
        return table

    def _write(self) -> None:
        bits = torch.tensor(self._scalings, dtype=torch.float32).view(torch.int32).tolist()
        rows = [
            self._ranks,
            [_whole(rank) for rank in self._ranks],
            [bit & 0xFFFFFFFF for bit in bits],
        ]
        host = torch.tensor(rows, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._state.copy_(host, non_blocking=True)
        for page in self._pages:
            page.refresh(self._state)


def _whole(rank: int) -> int:
    return -(-rank // WHOLE) * WHOLE


def _constants(pools: Pools) -> tuple[Tensor, Tensor]:
    """Entries [L*S, 8] and sources [4, L*S] of one layer, without what the slots hold."""
    a, b, count = pools.a, pools.b, len(pools.slices)
    entries = torch.zeros((a.shape[0], count, ENTRY_FIELDS), dtype=torch.int64)
    sources = torch.zeros((4, a.shape[0], count), dtype=torch.int64)
    slot = torch.arange(a.shape[0])[:, None]
    size = a.element_size()
    number = torch.arange(count)
    starts = torch.tensor([sum(pools.slices[:s]) for s in range(count)])
    entries[:, :, A_STRIDE] = a.stride(1)
    entries[:, :, B_PTR] = b.data_ptr() + (slot * b.stride(0) + starts * b.stride(1)) * size
    entries[:, :, B_STRIDE] = b.stride(1)
    sources[0] = slot
    sources[1] = a.data_ptr() + slot * a.stride(0) * size
    sources[2] = number * a.stride(1) * size
    sources[3] = int(pools.rank_multiple == WHOLE)
    return entries.view(-1, ENTRY_FIELDS), sources.view(4, -1)
