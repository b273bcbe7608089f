"""Numbers of tokens at which a layer launches every kernel that it ever will.

What a kernel is compiled for depends on the number of tokens in three ways: by the choice, by the
height of the routing's tiles, and by whether a small last wave of tiles is computed in halves. A
server that has run a layer at these numbers compiles nothing later, whatever its steps look like.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from loraplex.ops.fused import count_tiles, whole_tiles
from loraplex.ops.impls import resolve, wanted_of
from loraplex.ops.routed import Layout, layout_of, problem_on
from loraplex.routing import tile_height
from loraplex.table import AdapterTable
from loraplex.tuning import Problem, Stretch, stretches


def sizes_to_compile(
    op: str,
    x: Tensor,
    table: AdapterTable,
    max_tokens: int,
    weight: Tensor | None = None,
    impl: str = "auto",
) -> list[int]:
    """Numbers of tokens, ascending, that launch all that 1 to ``max_tokens`` tokens can launch.

    They are the largest of their kind, so what does not fit into memory is found out as well.

    Args:
        op: ``"lora_linear"`` or ``"add_lora"``.
        x: [any number of tokens, K], with strides like those of the inputs to come.
        table: of the layer; routings are as high as their number of tokens needs, as those of
            :meth:`Routing.from_indices` are.
        weight: [N, K] of ``lora_linear``.
        impl: as the op takes it.

    Raises:
        UnsupportedImplError: ``impl`` was named and cannot run here.

    Example:
        >>> import torch, loraplex as lp
        >>> table = lp.AdapterTable.from_pools(torch.randn(3, 8, 64), torch.randn(3, 32, 8))
        >>> sizes_to_compile("lora_linear", torch.empty(1, 64), table, 100, torch.empty(32, 64))
        [16, 32, 64, 100]
    """
    layout = Layout(*layout_of(table))
    problem = problem_on(op, x, table.slices, table.num_adapters, layout, weight)
    found: dict[object, int] = {}
    for stretch in _stretches(problem, max_tokens, impl, x.device):
        configs = stretch.choice.configs.items()
        blocks = tuple((kernel, tuple(config.items())) for kernel, config in configs)
        for size, has_halves in _ways(stretch, table.slices, x.device):
            found[stretch.choice.impl, blocks, tile_height(size), has_halves] = size
    return sorted(found.values())


def _stretches(
    problem: Problem, max_tokens: int, impl: str, device: torch.device
) -> Iterator[Stretch]:
    """Stretches with one choice of all kernels and one height of tiles."""
    choice = resolve(replace(problem, m=1), impl, device)
    if choice.impl == "torch":
        found = [Stretch(1, max_tokens, choice)]
    else:
        found = stretches(problem, max_tokens, wanted_of(impl))
    for stretch in found:
        is_bare = stretch.choice.impl == "gemm_add" and not stretch.choice.configs
        # its LoRA part is add_lora_ as that is chosen
        parts = stretches(replace(problem, op="add_lora"), max_tokens) if is_bare else [stretch]
        for part in parts:
            first, last = max(part.first, stretch.first), min(part.last, stretch.last)
            while first <= last:
                # the next size at which tiles change their height, if any does
                end = tile_height(first)
                end = last if tile_height(last) == end else end
                yield Stretch(first, end, part.choice)
                first = end + 1


def _ways(
    stretch: Stretch, slices: tuple[int, ...], device: torch.device
) -> Iterator[tuple[int, bool]]:
    """The largest size with a last wave in halves and the largest without, as far as there are."""
    linear = stretch.choice.configs.get("linear", {})
    if not linear.get("halves_tail"):
        yield stretch.last, False
        return
    block_m = min(linear["block_m"], tile_height(stretch.last))
    seen = set()
    for blocks in range(-(-stretch.last // block_m), (stretch.first - 1) // block_m, -1):
        size = min(stretch.last, blocks * block_m)
        tiles = count_tiles(size, slices, block_m, linear["block_n"])
        has_halves = whole_tiles(tiles, linear, device) is not None
        if has_halves not in seen:
            seen.add(has_halves)
            yield size, has_halves
