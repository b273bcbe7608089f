"""Base GEMM and LoRA together."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from loraplex.checks import check_same, check_shape, check_tensor
from loraplex.counters import counters_of
from loraplex.ops.gradient import without_backward
from loraplex.ops.impls import (
    check_impl,
    count_at_a_time,
    count_early,
    has_dependent_launch,
    precision_of,
    resolve,
)
from loraplex.ops.library import LAYOUT, ROUTED, register
from loraplex.ops.routed import (
    Layout,
    Routed,
    check_bias,
    check_routed,
    layout_of,
    problem_of,
    room_for_shrink,
    run_expand,
    run_shrink,
    shrink_rows_of,
)
from loraplex.reference import lora as reference
from loraplex.routing import Routing
from loraplex.table import AdapterTable
from loraplex.tuning import Choice, Problem, choose
from loraplex.tuning.choose import Config


def lora_linear(
    x: Tensor,
    weight: Tensor,
    table: AdapterTable,
    routing: Routing,
    bias: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Linear layer in which every token adds its own adapter, or none.

    Semantics, for row m with adapter l in slice s; rows of index -1 are the base layer::

        y[m] = column_scale[l] * (x[m] @ W.T + scaling[l] * (x[m] @ A[l].T) @ B[l].T)
               + bias + adapter_bias[l]

    Args:
        x: [M, K], float32, float16 or bfloat16 (float64 with the torch reference); any strides.
        weight: [N, K], like ``torch.nn.Linear.weight``; any strides.
        table: adapters of this layer; routing: adapter of each token.
        bias: [N] or None.
        impl: ``"auto"``, ``"torch"``, ``"triton"``, ``"fused"`` (expand on the GEMM's accumulator)
            or ``"gemm_add"`` (``F.linear``, then :func:`add_lora_`).

    Returns:
        [M, N] in the dtype of x, under autocast too.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, device or shape.
        UnsupportedImplError: ``impl`` was named and cannot run here.

    Example:
        >>> import torch, loraplex as lp
        >>> x, weight = torch.randn(4, 64), torch.randn(32, 64)
        >>> table = lp.AdapterTable.from_pools(torch.randn(3, 8, 64), torch.randn(3, 32, 8))
        >>> routing = lp.Routing.from_indices([2, 0, -1, 2], num_adapters=3)
        >>> lp.lora_linear(x, weight, table, routing).shape
        torch.Size([4, 32])
    """
    check_routed(x, table, routing)
    check_shape("weight", check_tensor("weight", weight), [table.out_features, x.shape[1]])
    check_same("weight", weight, "x", x)
    check_bias(bias, x, table.out_features)
    check_impl("lora_linear", impl)

    def run() -> Tensor:
        y: Tensor = torch.ops.loraplex.lora_linear(
            x, weight, bias, table.entries, table.storages, routing.indices, routing.places,
            routing.plan, table.slices, layout_of(table), impl,
        )  # fmt: skip
        return y

    return without_backward("lora_linear", run, x, weight, bias)


def _lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    entries: Tensor,
    storages: list[Tensor],
    indices: Tensor,
    places: Tensor,
    plan: Tensor,
    slices: list[int],
    layout: list[int],
    impl: str,
) -> Tensor:
    routed = Routed(entries, storages, indices, places, plan, tuple(slices), Layout(*layout))
    problem = problem_of("lora_linear", x, routed, weight)
    choice = resolve(problem, impl, x.device)
    if x.shape[0] == 0 or not routed.has_adapters:
        return F.linear(x, weight, bias)
    if choice.impl == "torch":
        adapters = routed.adapters(x.shape[1], x.dtype)
        return reference.lora_linear(x, weight, adapters, indices, bias)
    return run_choice(choice, x, weight, bias, routed)


def run_choice(
    choice: Choice, x: Tensor, weight: Tensor, bias: Tensor | None, routed: Routed
) -> Tensor:
    """Run exactly this choice of kernels; a measurement calls it with choices of its own."""
    if choice.impl == "gemm_add":
        y = F.linear(x, weight, bias)
        # a rule may bring blocks for the LoRA part; without them it is add_lora_ as it is
        configs = choice.configs
        if not configs:
            configs = choose(_as_add(problem_of("lora_linear", x, routed, weight))).configs
        run_expand(y, x, bias, routed, configs)
        return y
    return _run_fused(x, weight, bias, routed, choice.configs["shrink"], choice.configs["linear"])


def _run_fused(
    x: Tensor, weight: Tensor, bias: Tensor | None, routed: Routed, shrink: Config, config: Config
) -> Tensor:
    if config.get("is_single_launch"):
        return _run_single_launch(x, weight, bias, routed, shrink, config)
    from loraplex.kernels.lora_linear import launch_lora_linear

    block_m = min(config["block_m"], routed.tile_m)
    block_n, split_k = config["block_n"], config["split_k"]
    tiles = -(-x.shape[0] // block_m) * sum(-(-width // block_n) for width in routed.slices)
    num_whole = _whole_tiles(tiles, config, x.device)
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


def _whole_tiles(tiles: int, config: Config, device: torch.device) -> int | None:
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
    tiles = -(-x.shape[0] // block_m) * sum(-(-width // block_n) for width in routed.slices)
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


def _as_add(problem: Problem) -> Problem:
    return Problem(
        "add_lora", problem.m, problem.k, problem.slices, problem.num_adapters, problem.max_rank,
        problem.dtype, problem.arch, problem.is_vectorizable,
    )  # fmt: skip


def _fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


register(
    f"lora_linear(Tensor x, Tensor weight, Tensor? bias, {ROUTED}, {LAYOUT}) -> Tensor",
    _lora_linear,
    _fake,
)
