"""The adapters of one layer: a pointer table over the tensors that vLLM has stacked per slot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex.checks import is_aligned
from loraplex.table import AdapterTable


class LayerSlots:
    """Table over vLLM's stacked tensors, which are used where they are.

    Args:
        a_stacked: per slice [L, 1, R_max, K].
        b_stacked: per slice [L, 1, width, R_max], same dtype and device.
    """

    def __init__(self, a_stacked: Sequence[Tensor], b_stacked: Sequence[Tensor]) -> None:
        self.a_stacked, self.b_stacked = tuple(a_stacked), tuple(b_stacked)
        first = self.a_stacked[0]
        num_adapters, _, max_rank, in_features = first.shape
        self.table = AdapterTable.allocate(
            num_adapters,
            in_features,
            [b.shape[2] for b in self.b_stacked],
            max_rank=max_rank,
            dtype=first.dtype,
            device=first.device,
            rank_multiple=_rank_multiple([*self.a_stacked, *self.b_stacked], max_rank),
            storages=[*self.a_stacked, *self.b_stacked],
        )

    def point_(self, slot: int, ranks: Sequence[int]) -> None:
        """Let a slot's entries say what vLLM has just copied there; rank 0 = absent slice.

        vLLM clears a slot before it copies, so rows and columns past a rank are zero, and a rank
        may be rounded up to whole vectors.
        """
        multiple, table = self.table.rank_multiple, self.table
        records = []
        for a, b, rank in zip(self.a_stacked, self.b_stacked, ranks, strict=True):
            whole = -(-rank // multiple) * multiple
            if rank > table.max_rank:
                raise ValueError(f"rank must be at most {table.max_rank}, got {rank}")
            records.append(table.pack_entry(a[slot, 0, :whole], b[slot, 0, :, :whole], 1.0))
        host = torch.tensor(records, dtype=torch.int64)
        if table.device.type == "cuda":
            host = host.pin_memory()
        table.entries[slot].copy_(host, non_blocking=True)

    def clear_(self, slot: int) -> None:
        """Make a slot empty."""
        self.table.entries[slot].zero_()


def _rank_multiple(tensors: Sequence[Tensor], max_rank: int) -> int:
    """8 if whole vectors of every slot, slice and row can be loaded, else 1."""
    return 8 if max_rank % 8 == 0 and all(is_aligned(t) for t in tensors) else 1
