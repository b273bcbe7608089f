"""Candidates of ``loraplex tune`` for the launch with warps of its own for the adapters (Hopper).

All time of a decode batch is the weight's, so that a candidate is a way to have as much of it on
its way as fits: few programs with deep buffers, one or two to a multiprocessor, K in as many parts
as make one wave of them. ``docs/kernels/specialized_launch.md`` says what the keys mean.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from loraplex.bench.layers_batch import Batch
from loraplex.counters import EXCHANGE_WORDS
from loraplex.ops.fused import columns_of_adapter
from loraplex.tuning.choose import Config

ARCH = "sm_90"
DTYPES = (torch.float16, torch.bfloat16)
MOST_ROWS = 64
# candidates of the first round for a batch
MOST = 12
# Shared memory of a multiprocessor, and what the driver takes of it for each program.
SHARED_BYTES, DRIVER_BYTES = 228 * 1024, 1024
# What a program takes besides its blocks, by its warps that multiply: barriers, what the other
# warps are told, and room to bring the result into the order of y.
OTHER_BYTES = {4: 3 * 1024, 8: 9 * 1024}
# The warps with the adapters: strips of the shrink's K that they sum, rows of a share, and how many
# steps of a strip are no loop.
STRIPS, ROWS, MOST_UNROLLED = 4, 16, 4
# What must not spill. A loop holds two steps at a time in registers; where a thread has few of
# them, with 8 warps that multiply or two programs on a multiprocessor, steps have to be short
# (elements of A by occupancy) and to end with K, for masks are registers too. So are planes of v,
# one for each part of the shrink's K, and adapters of a tile: many leave no room beside 8 warps.
MOST_LOOPED = {1: 1024, 2: 512}
MOST_PLANES, MANY_ADAPTERS = 4, 16

# (block_n, block_k, num_warps, num_stages, occupancy) by block_m
TILES: dict[int, tuple[tuple[int, int, int, int, int], ...]] = {
    16: (
        (64, 128, 4, 8, 1),
        (64, 128, 4, 5, 1),
        (64, 128, 4, 6, 1),
        (128, 128, 4, 5, 1),
        (128, 128, 4, 3, 1),
        (128, 64, 4, 8, 1),
        (256, 64, 8, 5, 1),
        (64, 128, 4, 4, 2),
        (64, 64, 4, 8, 2),
        (128, 64, 4, 4, 2),
    ),
    64: (
        (64, 128, 4, 4, 1),
        (64, 128, 4, 6, 1),
        (128, 64, 4, 6, 1),
        (128, 64, 4, 5, 1),
        (128, 128, 4, 4, 1),
        (256, 64, 8, 4, 1),
        (64, 64, 4, 5, 2),
    ),
}
SPLITS = (1, 2, 3, 4, 6)
# Tiles too narrow for a wide layer come in so many waves that their ends cost more than they win.
MOST_WAVES = 3
# One wave that leaves more of the GPU idle than this may be worse than two.
FULL_WAVE = 0.75

# (block_r, block_k, split_k), the first that may be for the first round
SHRINKS = (
    (16, 128, 4),
    (16, 128, 2),
    (16, 64, 4),
    (16, 64, 2),
    (16, 128, 1),
    (16, 128, 8),
    (16, 64, 8),
    (16, 32, 8),
    (16, 32, 4),
    (16, 32, 1),
    (32, 64, 4),
    (32, 64, 2),
    (32, 32, 4),
    (64, 32, 4),
)
BLOCK_RS = (128, 64, 32, 16)


def is_offered(batch: Batch, arch: str) -> bool:
    """Whether the launch is written for this: decode on Hopper, rows that start on 16 bytes."""
    return (
        arch == ARCH
        and batch.dtype in DTYPES
        and batch.m <= MOST_ROWS
        and all(size % 8 == 0 for size in (batch.layer.k, batch.capacity, *batch.ranks))
        and columns_of_adapter(batch.capacity) <= BLOCK_RS[0]
    )


def shared_bytes(shrink: Config, linear: Config) -> int:
    """What a program takes of shared memory, a little more than less.

    Blocks of W and x, blocks of B and v, room to sum the shrink's strips in float32, and the rest.
    """
    stages = linear["num_stages"] * linear["block_k"]
    buffers = linear["lora_stages"] * linear["block_r"]
    blocks = 2 * (linear["block_n"] + linear["block_m"]) * (stages + buffers)
    return blocks + 4 * STRIPS * ROWS * shrink["block_r"] + OTHER_BYTES[linear["num_warps"]]


def fits(shrink: Config, linear: Config) -> bool:
    """Whether as many programs as it says have room on a multiprocessor."""
    return linear["occupancy"] * (shared_bytes(shrink, linear) + DRIVER_BYTES) <= SHARED_BYTES


def opening(batch: Batch, multiprocessors: int) -> list[tuple[Config, Config]]:
    """Shrink and linear parts for the first round, at most ``MOST``."""
    first: list[tuple[Config, Config]] = []
    second: list[tuple[Config, Config]] = []
    block_m = 16 if batch.m <= 16 else 64
    for block_n, block_k, warps, stages, occupancy in TILES[block_m]:
        if block_n > 2 * max(batch.layer.slices) or (warps == 8 and _has_many_adapters(batch)):
            continue
        count = -(-batch.m // block_m) * sum(-(-width // block_n) for width in batch.layer.slices)
        splits = _splits(batch, count, block_k, occupancy * multiprocessors)
        for found, split in zip((first, second), splits, strict=False):
            linear = {
                "is_specialized": 1, "block_m": block_m, "block_n": block_n, "block_k": block_k,
                "split_k": split, "lora_steps": _lora_steps(block_k, split),
                "occupancy": occupancy, "num_warps": warps, "num_stages": stages,
            }  # fmt: skip
            shrink = _shrinks(batch, linear)[0]
            found += [
                (shrink, {**linear, **buffers}) for buffers in _buffers(batch, shrink, linear)
            ][:1]
    return [*first, *second][:MOST]


def changes(batch: Batch, shrink: Config, linear: Config) -> list[tuple[str, Config]]:
    """Other shrinks, and other settings of a tile, for the second round."""
    found = [("shrink", other) for other in _shrinks(batch, linear) if fits(other, linear)]
    found += [("linear", buffers) for buffers in _buffers(batch, shrink, linear)]
    split, block_k = linear["split_k"], linear["block_k"]
    for other in (split - 1, split + 1):
        if other >= 1 and block_k * other <= batch.layer.k:
            steps = _lora_steps(block_k, other)
            found.append(("linear", {"split_k": other, "lora_steps": steps}))
    if split > 1:
        usual = _lora_steps(block_k, split)
        found += [("linear", {"lora_steps": steps}) for steps in (0, usual, 2 * usual)]
    return found


def _shrinks(batch: Batch, linear: Config) -> list[Config]:
    """Shares of the shrink that lie within K and an adapter's ranks, the first to try in front."""
    occupancy = linear["occupancy"]
    has_few_registers = linear["num_warps"] == 8 or occupancy == 2
    most_ranks = 16 if occupancy == 2 else max(16, batch.capacity)
    found: list[Config] = []
    for block_r, block_k, split in SHRINKS:
        span = block_k * STRIPS * split
        is_loop = batch.layer.k > MOST_UNROLLED * span
        is_long = is_loop and block_r * block_k > MOST_LOOPED[occupancy]
        if (
            span > batch.layer.k
            or block_r > most_ranks
            or (has_few_registers and (is_long or batch.layer.k % span != 0))
            or (_has_many_adapters(batch) and split > MOST_PLANES)
            or split * batch.m * len(batch.layer.slices) * batch.capacity > EXCHANGE_WORDS
        ):
            continue
        found.append({"block_r": block_r, "block_k": block_k, "split_k": split})
    return found or [{"block_r": 16, "block_k": 32, "split_k": 1}]


def _has_many_adapters(batch: Batch) -> bool:
    return min(batch.num_slots, batch.m) > MANY_ADAPTERS


def _splits(batch: Batch, count: int, block_k: int, room: int) -> list[int]:
    """Parts of K: the most that are one wave, and the next if that one is not full."""
    possible = [split for split in SPLITS if block_k * split <= batch.layer.k] or [1]
    if count > MOST_WAVES * room:
        return []
    within = [split for split in possible if count * split <= room] or [1]
    found = within[-1:]
    if count * found[0] < FULL_WAVE * room:
        found += [split for split in possible if split > found[0]][:1]
    return found


def _lora_steps(block_k: int, split: int) -> int:
    """The first part of a tile takes more of K, so that the others' sums are there when it ends."""
    return -512 // block_k if split > 1 else 0


def _buffers(batch: Batch, shrink: Config, linear: Config) -> Iterator[Config]:
    """Blocks of B and v that fit beside a tile, the widest that may be filled in front."""
    # columns of the adapters that may lie in a tile, whoever occurs
    least = columns_of_adapter(batch.capacity)
    columns = min(batch.num_slots, batch.m, linear["block_m"]) * least
    widest = next((r for r in reversed(BLOCK_RS) if r >= columns), BLOCK_RS[0])
    for block_r in (r for r in BLOCK_RS if least <= r <= widest):
        # a second buffer is for a second block
        for stages in (2, 4, 1) if columns > 2 * block_r else (2, 1) if columns > block_r else (1,):
            found = {"block_r": block_r, "lora_stages": stages}
            if fits(shrink, {**linear, **found}):
                yield found
