"""Base GEMM and LoRA together."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from loraplex.checks import check_same, check_shape, check_tensor
from loraplex.ops.impls import has_dependent_launch, precision_of, resolve
from loraplex.ops.library import LAYOUT, ROUTED, register
from loraplex.ops.routed import (
    Layout,
    Routed,
    check_bias,
    check_routed,
    layout_of,
    problem_of,
    run_expand,
    run_shrink,
)
from loraplex.reference import lora as reference
from loraplex.reference.routing import item_height
from loraplex.routing import Routing
from loraplex.table import AdapterTable
from loraplex.tuning import Problem, choose
from loraplex.tuning.choose import Config

# columns of v are allocated in whole K-blocks of the decode kernel, of at most this many
WIDE_COLUMNS = 128


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
        [M, N] in the dtype of x.

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
    y: Tensor = torch.ops.loraplex.lora_linear(
        x, weight, bias, table.entries, table.storages, routing.indices, routing.places,
        routing.plan, table.slices, layout_of(table), impl,
    )  # fmt: skip
    return y


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
    if choice.impl == "gemm_add":
        y = F.linear(x, weight, bias)
        run_expand(y, x, bias, routed, choose(_as_add(problem)).configs)
        return y
    run = _run_decode if choice.impl == "decode" else _run_fused
    return run(x, weight, bias, routed, choice.configs["shrink"], choice.configs["linear"])


def _run_fused(
    x: Tensor, weight: Tensor, bias: Tensor | None, routed: Routed, shrink: Config, config: Config
) -> Tensor:
    from loraplex.kernels.lora_linear import launch_lora_linear

    y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    partial = run_shrink(x, routed, shrink)
    launch_lora_linear(
        x,
        weight,
        bias,
        y,
        routed.entries,
        routed.layout.b_inner_stride,
        partial,
        routed.indices,
        routed.places,
        routed.plan,
        slices=routed.slices,
        rank_multiple=routed.layout.rank_multiple,
        has_column_scale=bool(routed.layout.has_column_scale),
        has_adapter_bias=bool(routed.layout.has_bias),
        tile_m=routed.tile_m,
        num_places=routed.num_places,
        precision=precision_of(x),
        block_m=min(config["block_m"], routed.tile_m),
        block_n=config["block_n"],
        block_k=config["block_k"],
        block_r=config["block_r"],
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
    return y


def _run_decode(
    x: Tensor, weight: Tensor, bias: Tensor | None, routed: Routed, shrink: Config, config: Config
) -> Tensor:
    from loraplex.kernels.lora_linear_decode import launch_lora_linear_decode
    from loraplex.kernels.shrink import launch_shrink_wide

    num_tokens, tile_m = x.shape[0], routed.tile_m
    num_slices, max_rank = len(routed.slices), routed.layout.max_rank
    num_tiles = -(-num_tokens // tile_m)
    most_columns = min(tile_m, routed.entries.shape[0]) * max_rank
    columns = -(-most_columns // WIDE_COLUMNS) * WIDE_COLUMNS
    block_m = min(config["block_m"], tile_m)
    block_n, split_k = config["block_n"], config["split_k"]
    programs = -(-num_tokens // block_m) * sum(-(-width // block_n) for width in routed.slices)

    device = x.device
    y = torch.empty((num_tokens, weight.shape[0]), dtype=x.dtype, device=device)
    v = torch.empty((num_tokens, num_slices, columns), dtype=x.dtype, device=device)
    groups = torch.empty((num_tiles, num_slices, columns // 8, 2), dtype=torch.int64, device=device)
    arrivals = torch.empty((programs if split_k > 1 else 0,), dtype=torch.int32, device=device)
    planes_size = split_k * programs * block_m * block_n if split_k > 1 else 0
    planes = torch.empty((planes_size,), dtype=torch.float32, device=device)
    is_dependent = has_dependent_launch(device)
    launch_shrink_wide(
        x,
        routed.entries,
        routed.plan,
        v,
        groups,
        arrivals,
        tile_m=tile_m,
        item_m=item_height(tile_m),
        num_items=routed.num_items,
        num_places=routed.num_places,
        max_rank=max_rank,
        wide_block=config["block_k"],
        is_dependent=is_dependent,
        block_r=min(shrink["block_r"], max(16, 1 << (max_rank - 1).bit_length())),
        block_k=shrink["block_k"],
        num_warps=shrink["num_warps"],
        num_stages=shrink["num_stages"],
    )
    launch_lora_linear_decode(
        x,
        weight,
        bias,
        y,
        routed.entries,
        v,
        groups,
        routed.indices,
        routed.plan,
        planes,
        arrivals,
        slices=routed.slices,
        has_column_scale=bool(routed.layout.has_column_scale),
        has_adapter_bias=bool(routed.layout.has_bias),
        tile_m=tile_m,
        num_places=routed.num_places,
        split_k=split_k,
        is_dependent=is_dependent,
        block_m=block_m,
        block_n=block_n,
        block_k=config["block_k"],
        is_swapped=bool(config["is_swapped"]),
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
