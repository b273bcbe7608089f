"""One problem of the routed ops."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

OPS = ("lora_linear", "add_lora", "multi_lora")
# These take every problem. Any other implementation may refuse one with a reason.
GENERAL_IMPLS = frozenset({"torch", "fused", "gemm_add", "shrink_expand", "one_launch", "tiles"})


@dataclass(frozen=True)
class Case:
    """One problem of the routed ops; ``name`` is its test id.

    Attributes:
        m, k, slices: tokens, in-features, widths of the outputs.
        ranks: per slot, or per slot and slice (``table="set"`` only); 0 = no adapter.
        max_rank: capacity; 0 for some columns more than the largest rank.
        indices: slots by row, or a popularity: ``base``, ``identical``, ``distinct`` (slots and the
            base in turn), ``uniform``, ``zipf``.
        index_layout: ``dense``, ``strided``, or ``host`` (in host memory whatever the device).
        x, weight, pools, y: one of ``LAYOUTS``; x may be ``expanded`` (row stride 0).
        table: ``pools`` (dense pools) or ``set`` (a tensor per slot and slice).
        max_tokens: capacity of the routing; 0 for exactly ``m``.
        is_large: too large for Triton's interpreter.
    """

    name: str
    m: int = 7
    k: int = 48
    slices: tuple[int, ...] = (40,)
    ranks: tuple[int | tuple[int, ...], ...] = (8, 16, 8)
    max_rank: int = 0
    indices: str | tuple[int, ...] = "distinct"
    index_dtype: torch.dtype = torch.int32
    index_layout: str = "dense"
    x: str = "dense"
    weight: str = "dense"
    pools: str = "dense"
    y: str = "dense"
    has_bias: bool = False
    has_column_scale: bool = False
    has_adapter_bias: bool = False
    table: str = "pools"
    rank_multiple: int | None = None
    max_tokens: int = 0
    is_large: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def capacity(self) -> int:
        """R_max."""
        ranks = [rank for slot in self.slot_ranks() for rank in slot]
        return self.max_rank or -(-max(ranks, default=0) // 8) * 8 + 8

    def slot_ranks(self) -> list[tuple[int, ...]]:
        """Ranks per slot and slice."""
        count = len(self.slices)
        return [(r,) * count if isinstance(r, int) else r for r in self.ranks]

    def concerns(self, op: str) -> bool:
        """Whether the op has every feature of this case, and every odd layout reaches it."""
        if op == "multi_lora" and (
            self.has_bias or self.has_column_scale or self.has_adapter_bias
            or self.table == "set" or self.max_tokens or self.rank_multiple
        ):  # fmt: skip
            return False
        return (self.weight == "dense" or op == "lora_linear") and (
            self.y == "dense" or op == "add_lora" or self.x != "dense"
        )

    def row_slots(self) -> list[int]:
        """The slot of each row."""
        if not isinstance(self.indices, str):
            return list(self.indices)
        slots = len(self.ranks)
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        if self.indices == "base":
            return [-1] * self.m
        if self.indices == "identical":
            return [0] * self.m
        if self.indices == "distinct":
            return [row % slots for row in range(self.m)]
        if self.indices == "mixed":
            return [(row + 1) % (slots + 1) - 1 for row in range(self.m)]
        if self.indices == "uniform":
            return torch.randint(-1, slots, (self.m,), generator=generator).tolist()
        if self.indices == "zipf":
            shares = 1 / torch.arange(1, slots + 1, dtype=torch.float64)
            drawn = torch.multinomial(shares, max(self.m, 1), True, generator=generator)
            return drawn[: self.m].tolist()
        raise ValueError(f"indices must be slots or a known popularity, got {self.indices!r}")


SWEEP = (1, 3, 5, 8, 12, 16, 24, 31, 32, 33, 48, 64, 96, 128, 200, 256)

# A new shape is a row. Names that begin with K are rows of the list of problems users really hit;
# tests/ops/test_known_problems.py says which is where.
CASES = (
    # how many tokens, and whose
    Case("K30_tokens_0", m=0),
    Case("tokens_1", m=1, indices=(2,)),
    Case("tokens_1_base", m=1, indices="base"),
    Case("K30_all_base", m=5, indices="base", has_bias=True),
    Case("some_base", m=9, indices=(1, -1, 0, -1, 2, -1, -1, 1, 0)),
    Case("one_adapter", m=17, indices="identical"),
    Case("all_distinct", m=16, ranks=(8,) * 16),
    Case("uniform", m=19, ranks=(8, 16, 4, 12), indices="uniform"),
    Case("zipf", m=33, ranks=(16,) * 6, indices="zipf"),
    Case("K09_one_slot", m=4, ranks=(8,), indices=(-1, 0, -1, 0)),
    Case("K03_rows_15", m=15, k=64, ranks=(32,), indices="identical"),
    # ranks
    Case("ranks_mixed", m=14, ranks=(0, 1, 2, 3, 5, 8, 12, 16, 24, 31, 32, 33, 48)),
    Case("K04_ranks_under_16_rows_1", m=1, ranks=(2,)),
    Case("K04_ranks_under_16_rows_33", m=33, ranks=(1, 2, 4, 8)),
    Case("K05_ranks_5_and_8", m=6, slices=(24, 16), ranks=(5, 8)),
    Case("K06_rank_sweep", m=16, k=40, slices=(24,), ranks=SWEEP),
    Case("K21_max_rank_256", m=5, k=40, slices=(24,), ranks=(256, 4, 0, 100), max_rank=256),
    Case("K21_max_rank_512", m=3, k=40, slices=(24,), ranks=(4, 256), max_rank=512),
    Case("ranks_all_0", m=3, ranks=(0, 0)),
    Case("rank_is_capacity", m=4, ranks=(16, 16), max_rank=16),
    Case("rank_1_of_1", m=4, ranks=(1, 1), max_rank=1),
    # sizes
    Case("odd_sizes", m=5, k=37, slices=(29,), ranks=(5, 8)),
    Case("K08_n_1", m=33, k=17, slices=(1,)),
    Case("K08_n_33", m=3, slices=(33,)),
    Case("K08_n_3424", m=1, slices=(3424,), indices=(1,)),
    Case("k_1", m=3, k=1, slices=(17,)),
    Case("n_over_blocks", m=3, k=24, slices=(150,)),
    Case("k_over_blocks", m=3, k=300, slices=(20,)),
    Case("slices_3", m=7, slices=(32, 8, 16)),
    Case("slices_odd", m=7, k=41, slices=(33, 1, 70, 16), ranks=(3, 8), indices="mixed"),
    Case("tiles_2", m=131, k=24, slices=(24,), indices="uniform"),
    Case("tiles_2_distinct", m=131, k=16, slices=(16,), ranks=(8,) * 70),
    Case("room_to_spare", m=5, max_tokens=20),
    Case("tile_to_spare", m=3, max_tokens=200, indices=(2, -1, 2)),
    # strides
    Case("x_wide", x="wide"),
    Case("x_odd", x="odd"),
    Case("x_stepped", x="stepped"),
    Case("x_transposed", x="transposed"),
    Case("K18_x_expanded", x="expanded"),
    Case("weight_wide", weight="wide"),
    Case("weight_odd", weight="odd"),
    Case("weight_stepped", weight="stepped"),
    Case("weight_transposed", weight="transposed"),
    Case("pools_wide", pools="wide"),
    Case("pools_odd", pools="odd"),
    Case("pools_stepped", pools="stepped"),
    Case("pools_transposed", pools="transposed"),
    Case("y_wide", y="wide"),
    Case("y_odd", y="odd", slices=(24, 9)),
    Case("y_stepped", y="stepped"),
    Case("y_transposed", y="transposed"),
    Case("K31_int64", indices=(2, 0, -1, 2, 1, 0, -1), index_dtype=torch.int64),
    Case("K31_strided", indices=(2, 0, -1, 2, 1, 0, -1), index_layout="strided"),
    Case("K31_host", indices=(2, 0, -1, 2, 1, 0, -1), index_layout="host"),
    # extras
    Case("bias", has_bias=True, slices=(24, 9)),
    Case("column_scale", has_column_scale=True, slices=(24, 9), indices="mixed"),
    Case("column_scale_bias", has_column_scale=True, has_bias=True, indices="mixed"),
    Case("adapter_bias", has_adapter_bias=True, slices=(24, 9), indices="mixed"),
    Case("extras_rank_0", ranks=(0, 8), has_column_scale=True, has_adapter_bias=True),
    Case(
        "everything",
        m=20,
        slices=(24, 9),
        has_bias=True,
        has_column_scale=True,
        has_adapter_bias=True,
        x="odd",
        weight="odd",
        pools="odd",
        y="odd",
        indices="uniform",
    ),
    # tables
    Case("set", table="set", ranks=(8, 5, 3)),
    Case("set_rank_multiple_8", table="set", ranks=(8, 16, 24), rank_multiple=8),
    Case("set_absent_slices", table="set", slices=(24, 8, 8), ranks=((0, 8, 0), (5, 0, 0), 7)),
    Case(
        "set_everything",
        table="set",
        slices=(24, 9),
        ranks=((8, 0), 0, 16),
        has_bias=True,
        has_column_scale=True,
        has_adapter_bias=True,
    ),
    Case("pools_rank_multiple_1", ranks=(8, 16), rank_multiple=1),
    Case("pools_rank_multiple_8", ranks=(8, 16), rank_multiple=8),
    # layers of real models
    Case("qkv_1", 1, 4096, (4096, 1024, 1024), (16,) * 8, is_large=True),
    Case("qkv_64", 64, 4096, (4096, 1024, 1024), (16,) * 8, indices="uniform", is_large=True),
    Case("gate_up_64", 64, 4096, (14336, 14336), (16,) * 8, indices="zipf", is_large=True),
    Case("down_16", 16, 14336, (4096,), (8, 16, 64), indices="mixed", is_large=True),
    Case("o_64_distinct", 64, 4096, (4096,), (16,) * 64, is_large=True),
    Case("o_256_mixed", 256, 4096, (4096,), (8, 16, 32, 64) * 8, indices="mixed", is_large=True),
    Case("qkv_4096", 4096, 4096, (4096, 1024, 1024), (16,) * 8, indices="mixed", is_large=True),
    Case("dora_1024", 1024, 4096, (4096,), (16,) * 4, has_column_scale=True, is_large=True),
    Case("K08_13696", 17, 3424, (13696,), (16, 8), indices="mixed", is_large=True),
    Case("K08_64256", 5, 3424, (64256,), (16, 8), indices="mixed", is_large=True),
    Case("K08_7392", 130, 48, (7392,), (16, 8), indices="mixed", is_large=True),
    Case("K16_127", 127, 4096, (12288,), (64,), indices="identical", is_large=True),
    Case("K16_128", 128, 4096, (12288,), (64,), indices="identical", is_large=True),
    Case("K16_129", 129, 4096, (12288,), (64,), indices="identical", is_large=True),
    Case("K16_474", 474, 4096, (4096,), (64,), indices="identical", is_large=True),
    Case("K16_2048", 2048, 4096, (4096,), (64,), indices="identical", is_large=True),
    Case("K21_decode_512", 64, 4096, (4096,), (4, 256, 512), indices="mixed", is_large=True),
)
