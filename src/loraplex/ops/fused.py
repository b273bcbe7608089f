"""The fused ways of lora_linear: two launches, one, or one with warps for the adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex import env
from loraplex.counters import EXCHANGE_WORDS, PER_STREAM, counters_of
from loraplex.errors import UnsupportedImplError
from loraplex.ops.impls import (
    arch_of,
    count_at_a_time,
    count_early,
    count_multiprocessors,
    has_aligned_rows,
    has_dependent_launch,
    precision_of,
)
from loraplex.ops.routed import Routed, room_for_shrink, run_shrink, shrink_rows_of
from loraplex.settled import are_settled
from loraplex.tuning.choose import Config


def run_fused(
    x: Tensor, weight: Tensor, bias: Tensor | None, routed: Routed, shrink: Config, config: Config
) -> Tensor:
    """Base GEMM and adapters on one accumulator, in the launches that ``config`` asks for."""
    if config.get("is_single_launch"):
        return _run_single_launch(x, weight, bias, routed, shrink, config)
    if config.get("is_specialized"):
        return _run_specialized(x, weight, bias, routed, shrink, config)
    from loraplex.kernels.lora_linear import launch_lora_linear

    block_m = min(config["block_m"], routed.tile_m)
    block_n, split_k = config["block_n"], config["split_k"]
    tiles = count_tiles(x.shape[0], routed.slices, block_m, block_n)
    num_whole = whole_tiles(tiles, config, x.device)
    # parts of a tile that several programs compute, the LoRA part among them, and who has arrived
    parts = split_k + 1 if split_k > 1 else 0 if num_whole is None else 2
    met = tiles - (num_whole or 0) if parts else 0
    planes = torch.empty((parts, met, block_m, block_n), dtype=torch.float32, device=x.device)
    arrivals = torch.empty((met,), dtype=torch.int32, device=x.device)
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    v, groups = run_shrink(x, routed, shrink, config["block_r"], arrivals)
    launch_lora_linear(
        x,
        weight,
        bias,
        y,
        routed.entries,
        routed.layout.b_inner_stride,
        v,
        groups,
        routed.indices,
        routed.places,
        routed.plan,
        planes,
        arrivals,
        slices=routed.slices,
        rank_multiple=routed.layout.rank_multiple,
        has_column_scale=bool(routed.layout.has_column_scale),
        has_adapter_bias=bool(routed.layout.has_bias),
        tile_m=routed.tile_m,
        num_places=routed.num_places,
        precision=precision_of(x),
        is_dependent=has_dependent_launch(x.device),
        num_early=count_early(x.device, config["num_warps"]),
        num_whole=num_whole,
        split_k=split_k,
        block_m=block_m,
        block_n=block_n,
        block_k=config["block_k"],
        block_r=config["block_r"],
        group_m=config["group_m"],
        lora_stages=config["lora_stages"],
        is_swapped=bool(config["is_swapped"]),
        has_early_b=bool(config.get("has_early_b", 0)),
        has_descriptor=bool(config.get("has_descriptor", 0)),
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
    return y


def count_tiles(num_tokens: int, slices: tuple[int, ...], block_m: int, block_n: int) -> int:
    """Tiles of an output [num_tokens, N] whose slices begin tiles of their own."""
    return -(-num_tokens // block_m) * sum(-(-width // block_n) for width in slices)


def whole_tiles(tiles: int, config: Config, device: torch.device) -> int | None:
    """How many tiles come before a last wave so small that halves of its tiles fit; None if it is
    larger, or the rule does not want them halved."""
    at_a_time = count_at_a_time(device, config["num_warps"])
    last_wave = tiles % at_a_time
    if not config.get("halves_tail") or not 0 < 2 * last_wave <= at_a_time:
        return None
    return tiles - last_wave


def _run_single_launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, routed: Routed, shrink: Config, config: Config
) -> Tensor:
    from loraplex.kernels.single_launch import launch_single

    block_m = min(config["block_m"], routed.tile_m)
    block_n, split_k = config["block_n"], config["split_k"]
    tiles = count_tiles(x.shape[0], routed.slices, block_m, block_n)
    has_lora_part = bool(config["has_lora_part"])
    planes = torch.empty(
        (split_k + has_lora_part - 1, tiles, block_m, block_n), dtype=torch.float32, device=x.device
    )
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    v, groups = room_for_shrink(x, routed, shrink, config["block_r"])
    max_rank = routed.layout.max_rank
    launch_single(
        x,
        weight,
        bias,
        y,
        routed.entries,
        routed.layout.a_inner_stride,
        routed.layout.b_inner_stride,
        v,
        groups,
        routed.indices,
        routed.places,
        routed.plan,
        planes,
        counters_of(x.device, 2 + tiles),
        slices=routed.slices,
        rank_multiple=routed.layout.rank_multiple,
        has_column_scale=bool(routed.layout.has_column_scale),
        has_adapter_bias=bool(routed.layout.has_bias),
        tile_m=routed.tile_m,
        item_m=routed.item_m,
        num_items=routed.num_items,
        num_places=routed.num_places,
        max_rank=max_rank,
        precision=precision_of(x),
        is_dependent=has_dependent_launch(x.device),
        shrink_r=shrink_rows_of(shrink, max_rank),
        shrink_k=shrink["block_k"],
        lanes=shrink["lanes"],
        shrink_stages=shrink["num_stages"],
        split_k=split_k,
        block_m=block_m,
        block_n=block_n,
        block_k=config["block_k"],
        block_r=config["block_r"],
        lora_stages=config["lora_stages"],
        expand_at=config["expand_at"],
        lora_steps=config["lora_steps"],
        has_lora_part=has_lora_part,
        has_early_b=bool(config.get("has_early_b", 0)),
        prefetch=config["prefetch"],
        is_early=bool(config["is_early"]),
        is_swapped=bool(config["is_swapped"]),
        has_descriptor=bool(config["has_descriptor"]),
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
    return y


def _run_specialized(
    x: Tensor, weight: Tensor, bias: Tensor | None, routed: Routed, shrink: Config, config: Config
) -> Tensor:
    _check_specialized(x, weight, routed)
    from loraplex.kernels.specialized import launch_specialized

    block_m = min(config["block_m"], routed.tile_m)
    block_n, split_k = config["block_n"], config["split_k"]
    tiles = count_tiles(x.shape[0], routed.slices, block_m, block_n)
    planes = torch.empty(
        (split_k - 1, tiles, block_n, block_m), dtype=torch.float32, device=x.device
    )
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    most_ranks = -(-routed.layout.max_rank // 8) * 8
    columns = columns_of_adapter(most_ranks)
    if columns > config["block_r"]:
        raise UnsupportedImplError(
            "is_specialized needs a block_r of at least max_rank, rounded up to a power of two; "
            f"got {config['block_r']} and {most_ranks}"
        )
    early = (weight, routed.indices, routed.places, routed.plan, routed.entries)
    _check_exchange(shrink["split_k"] * x.shape[0] * len(routed.slices) * most_ranks)
    launch_specialized(
        x,
        weight,
        bias,
        y,
        routed.entries,
        routed.indices,
        routed.places,
        routed.plan,
        planes,
        counters_of(x.device, 2 + tiles),
        slices=routed.slices,
        has_column_scale=bool(routed.layout.has_column_scale),
        has_adapter_bias=bool(routed.layout.has_bias),
        tile_m=routed.tile_m,
        item_m=routed.item_m,
        num_items=routed.num_items,
        num_places=routed.num_places,
        num_multiprocessors=count_multiprocessors(x.device),
        is_settled=are_settled(*early, *routed.storages),
        is_dependent=has_dependent_launch(x.device),
        exchange=PER_STREAM,
        most_ranks=most_ranks,
        columns=columns,
        v_split_k=shrink["split_k"],
        shrink_r=shrink_rows_of(shrink, routed.layout.max_rank),
        shrink_k=shrink["block_k"],
        split_k=split_k,
        lora_steps=config.get("lora_steps", 0),
        block_m=block_m,
        block_n=block_n,
        block_k=config["block_k"],
        block_r=config["block_r"],
        lora_stages=config["lora_stages"],
        occupancy=config["occupancy"],
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
    return y


def columns_of_adapter(max_rank: int) -> int:
    """Columns that each adapter of a pool has in a block of the specialised launch."""
    return max(8, 1 << (max_rank - 1).bit_length())


def _check_specialized(x: Tensor, weight: Tensor, routed: Routed) -> None:
    """Require what the specialised launch is written for; shipped rules ask for it only there.

    Raises:
        UnsupportedImplError: naming the rule's key, what it needs and what there is.
    """
    arch = arch_of(x.device)
    if arch != "sm_90" or env.is_interpreting():
        where = "Triton's interpreter" if env.is_interpreting() else arch
        raise UnsupportedImplError(f"is_specialized needs an sm_90 GPU, got {where}")
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedImplError(f"is_specialized needs float16 or bfloat16, got {x.dtype}")
    multiple = routed.layout.rank_multiple
    if multiple != 8 or not has_aligned_rows(x) or not has_aligned_rows(weight):
        raise UnsupportedImplError(
            "is_specialized needs rows of x and weight that are dense and start on 16 bytes, and "
            f"rank_multiple 8; got strides {x.stride()} and {weight.stride()}, and {multiple}"
        )


def _check_exchange(num_words: int) -> None:
    """Require that v fits where the programs of a stream leave it.

    Raises:
        UnsupportedImplError: naming what is too much.
    """
    if num_words > EXCHANGE_WORDS:
        raise UnsupportedImplError(
            "is_specialized needs split_k of the shrink * tokens * slices * max_rank of at most "
            f"{EXCHANGE_WORDS}, got {num_words}"
        )
