"""What ``loraplex tune`` tries: lists of block sizes by batch size, pruned by shape.

Three rounds keep the product small: tiles of the GEMM and of the expand with one shrink; then, on
the best of each, other shrinks and one setting of the tile at a time; then the best settings
together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from loraplex.bench import tune_specialized
from loraplex.bench.layers_batch import Batch
from loraplex.tuning import Choice
from loraplex.tuning.choose import Config

# Row blocks are as tall as the batch until there are several; the weight's tile is the tall operand
# (is_swapped) where that fills the tensor cores better. Few, deep stages lose at decode, where all
# time is the latency of reading the weight.
# (block_m, block_n, block_k, is_swapped, num_warps, num_stages)
Tile = tuple[int, int, int, int, int, int]
DECODE: tuple[Tile, ...] = (
    (16, 64, 64, 1, 4, 5),
    (16, 64, 128, 1, 4, 4),
    (16, 64, 128, 1, 8, 4),
    (16, 128, 64, 1, 4, 5),
    (16, 128, 64, 1, 8, 5),
    (16, 128, 128, 1, 8, 3),
)
SMALL: tuple[Tile, ...] = (
    (64, 32, 128, 0, 4, 4),
    (64, 64, 64, 0, 4, 5),
    (64, 64, 128, 0, 4, 4),
    (64, 64, 128, 0, 8, 3),
    (64, 128, 64, 1, 4, 4),
    (64, 128, 64, 0, 8, 4),
)
LARGE: tuple[Tile, ...] = (
    (64, 128, 64, 0, 4, 4),
    (64, 256, 64, 0, 8, 3),
    (128, 64, 64, 0, 4, 4),
    (128, 128, 64, 0, 4, 3),
    (128, 128, 64, 0, 8, 4),
    (128, 256, 64, 0, 8, 3),
)
# Tiles of the single launch, where two programs should fit on a multiprocessor: one stage less of K
# in flight, so that the shrink and the parts with adapters find room.
SINGLE: dict[str, tuple[Tile, ...]] = {
    "decode": (
        (16, 64, 128, 1, 4, 4),
        (16, 64, 128, 1, 4, 5),
        (16, 128, 64, 1, 4, 5),
        (16, 128, 128, 1, 4, 3),
    ),
    "small": (
        (64, 32, 128, 0, 4, 4),
        (64, 64, 64, 0, 4, 6),
        (64, 64, 128, 0, 4, 3),
        (64, 128, 64, 1, 4, 4),
    ),
    "large": (),
}
SPLITS = (1, 2, 3)
# Splitting K is for tiles too few to fill the GPU; beyond this many programs it only adds planes.
MOST_WAVES = 4

# (block_m, block_n, block_r, lora_stages, num_warps) of the expand pass over an output
EXPANDS = {
    "decode": ((16, 64, 64, 2, 4), (16, 128, 64, 2, 4), (16, 256, 32, 2, 4)),
    "small": ((64, 64, 64, 2, 4), (64, 128, 64, 2, 4), (32, 128, 32, 2, 4)),
    "large": ((64, 128, 32, 2, 8), (64, 128, 64, 2, 4), (128, 128, 32, 2, 8), (128, 64, 32, 2, 4)),
}

# (block_r, block_k, lanes, split_k, num_warps, num_stages); lanes are K-strips of one program. One
# lane stands for the wide way, where block_r counts columns of all slices: it wants many rows. What
# it stages should leave room for the GEMM's programs, which start beside it.
SHRINKS = (
    (16, 64, 2, 1, 4, 3),
    (16, 64, 4, 1, 4, 4),
    (16, 64, 4, 2, 4, 3),
    (16, 64, 4, 4, 4, 3),
    (16, 64, 4, 2, 4, 6),
    (16, 64, 4, 4, 4, 4),
    (16, 64, 8, 1, 8, 3),
    (16, 64, 8, 2, 8, 3),
    (32, 32, 4, 1, 4, 3),
    (64, 64, 1, 1, 4, 4),
    (64, 64, 1, 2, 4, 4),
    (64, 64, 1, 4, 4, 4),
    (64, 128, 1, 2, 4, 2),
    (64, 128, 1, 4, 4, 2),
    (32, 64, 1, 2, 4, 4),
    (128, 64, 1, 2, 8, 3),
)
FIRST_SHRINK = {"decode": (16, 64, 4, 2, 4, 3), "small": (16, 64, 4, 1, 4, 4),
                "large": (16, 64, 2, 1, 4, 3)}  # fmt: skip
BLOCK_RS = (16, 32, 64, 128)
LORA_STAGES = (2, 3)
GROUP_MS = (4, 8, 16)


@dataclass(frozen=True)
class Candidate:
    """One way to run ``lora_linear``: what a rule of a tuning table says, without conditions."""

    impl: str
    configs: Mapping[str, Config]

    @property
    def key(self) -> str:
        """The same text for the same blocks."""
        return f"{self.impl} {json.dumps(self.configs, sort_keys=True)}"

    def choice(self) -> Choice:
        """For the ops."""
        return Choice(self.impl, self.configs, "a candidate of loraplex tune")

    @property
    def is_specialized(self) -> bool:
        """Whether it is the launch with warps of its own for the adapters."""
        return bool(self.configs.get("linear", {}).get("is_specialized"))

    def changed(self, kernel: str, config: Config) -> Candidate:
        """With other blocks in one kernel."""
        return replace(self, configs={**self.configs, kernel: {**self.configs[kernel], **config}})


def size_class(m: int) -> str:
    """``decode``, ``small`` or ``large``, by rows of a tile."""
    return "decode" if m <= 16 else "small" if m <= 64 else "large"


def has_copy_engine(arch: str) -> bool:
    """Whether tiles may come through tensor descriptors (sm_90 and newer).

    Example:
        >>> [has_copy_engine(arch) for arch in ("sm_80", "sm_90", "gfx942", "cpu")]
        [False, True, False, False]
    """
    return arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90


def first_round(batch: Batch, multiprocessors: int, arch: str) -> list[Candidate]:
    """Every tile that this shape could want on an architecture, each with one shrink."""
    kind = size_class(batch.m)
    shrink = _fitting_shrinks(batch, (FIRST_SHRINK[kind],))[0]
    block_r, has_engine = _block_r(batch), has_copy_engine(arch)
    found = [
        Candidate("fused", {"shrink": shrink, "linear": linear})
        for linear in (
            *_tiles(batch, kind, block_r, has_engine),
            *_single_tiles(batch, kind, block_r, multiprocessors, has_engine),
        )
    ]
    if tune_specialized.is_offered(batch, arch):
        found += [
            Candidate("fused", {"shrink": own, "linear": linear})
            for own, linear in tune_specialized.opening(batch, multiprocessors)
        ]
    for block_m, block_n, block_r, stages, warps in EXPANDS[kind]:
        expand = {
            "block_m": block_m, "block_n": block_n, "block_r": block_r, "lora_stages": stages,
            "num_warps": warps, "num_stages": 2,
        }  # fmt: skip
        found.append(Candidate("gemm_add", {"shrink": shrink, "expand": expand}))
    return found


def second_round(batch: Batch, best: Candidate) -> list[Candidate]:
    """Other shrinks under the best tile, and other settings of the tile, one at a time."""
    if best.is_specialized:
        changes = tune_specialized.changes(batch, best.configs["shrink"], best.configs["linear"])
    else:
        changes = _changes(batch, best)
    found = [best.changed(kernel, config) for kernel, config in changes]
    return _distinct(c for c in found if c.key != best.key)


def third_round(best: Candidate, ordered: Sequence[Candidate]) -> list[Candidate]:
    """The best value of every setting at once.

    Args:
        ordered: candidates of the second round on ``best``, the fastest first, those slower than
            ``best`` left out.
    """
    together = best
    taken: set[str] = set()
    for candidate in ordered:
        for kernel, config in candidate.configs.items():
            # a setting may be one that the best tile does not name
            changed = {k: v for k, v in config.items() if best.configs[kernel].get(k) != v}
            # a shrink is changed as a whole, a tile one setting at a time
            names = {kernel} if kernel == "shrink" else {f"{kernel} {name}" for name in changed}
            if changed and not names & taken:
                both = together.changed(kernel, changed)
                # what fits one at a time may be too much together
                if both.is_specialized and not tune_specialized.fits(
                    both.configs["shrink"], both.configs["linear"]
                ):
                    continue
                taken |= names
                together = both
    known = {best.key, *(candidate.key for candidate in ordered)}
    return [] if together.key in known else [together]


def _changes(batch: Batch, best: Candidate) -> list[tuple[str, Config]]:
    changes: list[tuple[str, Config]] = [("shrink", s) for s in _fitting_shrinks(batch, SHRINKS)]
    main = "linear" if best.impl == "fused" else "expand"
    widest = batch.num_slots * -(-batch.capacity // 8) * 8
    changes += [(main, {"block_r": r}) for r in BLOCK_RS if r <= max(16, 2 * widest)]
    if main == "linear":
        changes += [(main, {"lora_stages": stages}) for stages in LORA_STAGES]
        # what is held in registers has to be narrow
        changes += [
            (main, {"has_early_b": 1, "block_r": r}) for r in (16, 32, 64) if r <= max(16, widest)
        ]
    if best.configs[main].get("is_single_launch"):
        changes += [(main, {"is_early": 0}), (main, {"has_descriptor": 0})]
        changes += [(main, {"prefetch": elements}) for elements in (0, 128)]
        if not best.configs[main]["has_lora_part"]:
            changes += [(main, {"expand_at": eighths}) for eighths in (5, 7)]
            changes += [(main, {"lora_steps": steps}) for steps in (0, 2, 8)]
    if main == "linear" and size_class(batch.m) == "large":
        changes += [(main, {"group_m": group}) for group in GROUP_MS]
        changes += [(main, {"halves_tail": 1})]
    return changes


def _tiles(batch: Batch, kind: str, block_r: int, has_copy_engine: bool) -> Iterator[Config]:
    lists = {"decode": DECODE, "small": SMALL, "large": LARGE}
    for block_m, block_n, block_k, is_swapped, warps, stages in lists[kind]:
        if block_n > 2 * max(batch.layer.slices):
            continue
        # the copy engine pays where few, large programs read a tile along all of K; K is split by
        # the single launch only
        for has_descriptor in (0, 1) if has_copy_engine and kind == "large" else (0,):
            yield {
                "block_m": block_m, "block_n": block_n, "block_k": block_k,
                "block_r": block_r, "split_k": 1, "is_swapped": is_swapped,
                "has_descriptor": has_descriptor, "has_early_b": 0, "halves_tail": 0,
                "group_m": 8, "lora_stages": 2,
                "num_warps": warps, "num_stages": stages,
            }  # fmt: skip


def _single_tiles(
    batch: Batch, kind: str, block_r: int, multiprocessors: int, has_copy_engine: bool
) -> Iterator[Config]:
    for block_m, block_n, block_k, is_swapped, warps, stages in SINGLE[kind]:
        if block_n > 2 * max(batch.layer.slices):
            continue
        tiles = -(-batch.m // block_m) * sum(-(-width // block_n) for width in batch.layer.slices)
        for split in SPLITS:
            if split > 1 and (
                tiles * split > MOST_WAVES * multiprocessors or block_k * split > batch.layer.k
            ):
                continue
            for has_lora_part in (0, 1):
                yield {
                    "block_m": block_m, "block_n": block_n, "block_k": block_k,
                    "block_r": block_r, "split_k": split, "is_swapped": is_swapped,
                    "has_descriptor": int(has_copy_engine), "group_m": 1, "lora_stages": 3,
                    "is_single_launch": 1, "has_lora_part": has_lora_part, "is_early": 1,
                    "has_early_b": 0,
                    "expand_at": 6 if split == 1 else 8,
                    "lora_steps": 0 if split == 1 or has_lora_part else 4,
                    "prefetch": 256, "num_warps": warps, "num_stages": stages,
                }  # fmt: skip


def _fitting_shrinks(batch: Batch, shrinks: Sequence[tuple[int, ...]]) -> list[Config]:
    names = ("block_r", "block_k", "lanes", "split_k", "num_warps", "num_stages")
    configs: list[Config] = [
        {**dict(zip(names, shrink, strict=True)), "is_wide": int(shrink[2] == 1)}
        for shrink in shrinks
        if shrink[2] > 1 or size_class(batch.m) == "large"
    ]
    # strips and splits that lie past the end of a short K would read nothing
    fitting = [c for c in configs if c["block_k"] * c["lanes"] * c["split_k"] <= batch.layer.k]
    return fitting or [{**configs[0], "block_k": 16, "lanes": 2, "split_k": 1}]


def _block_r(batch: Batch) -> int:
    """Columns of v that a tile holds, up to what one step takes."""
    tile_m = min(128, batch.m)
    columns = min(batch.adapters, tile_m) * batch.rank
    return next((size for size in BLOCK_RS if size >= columns), 64 if batch.m > 64 else 128)


def _distinct(candidates: Iterator[Candidate]) -> list[Candidate]:
    return list({candidate.key: candidate for candidate in candidates}.values())
