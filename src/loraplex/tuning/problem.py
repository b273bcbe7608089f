"""What a choice may depend on: nothing that differs between two steps of one captured graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One op on one layer and batch size.

    Attributes:
        op: ``lora_linear``, ``add_lora``, ``multi_lora`` or ``matmul``.
        m, k: tokens and in-features; slices: widths of the outputs.
        num_adapters, max_rank: capacity of the table (not what occurs in a step).
        dtype: ``float32``, ``float16``, ``bfloat16``.
        arch: ``sm_90``, ``gfx942``, ... or ``cpu``.
        is_vectorizable: x and weight have dense, 16-byte-aligned rows, the table rank_multiple 8.
    """

    op: str
    m: int
    k: int
    slices: tuple[int, ...]
    num_adapters: int = 0
    max_rank: int = 0
    dtype: str = "bfloat16"
    arch: str = "sm_90"
    is_vectorizable: bool = True

    @property
    def n(self) -> int:
        """Out-features."""
        return sum(self.slices)
