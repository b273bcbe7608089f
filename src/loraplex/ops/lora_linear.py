"""Base GEMM and LoRA together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from loraplex.ops import kept
from loraplex.ops.fused import run_fused
from loraplex.ops.gradient import without_backward
from loraplex.ops.impls import check_impl, resolve, wanted_of
from loraplex.ops.library import LAYOUT, ROUTED, is_plain, register
from loraplex.ops.routed import (
    Layout,
    Routed,
    check_bias,
    check_routed,
    check_weight,
    layout_of,
    problem_of,
    run_expand,
)
from loraplex.reference import lora as reference
from loraplex.routing import Routing
from loraplex.table import AdapterTable
from loraplex.tuning import Choice, Problem, choose


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
    check_weight(weight, x, table)
    check_bias(bias, x, table.out_features)
    check_impl("lora_linear", impl)

    def run() -> Tensor:
        call = _lora_linear if is_plain(x, weight, bias) else torch.ops.loraplex.lora_linear
        y: Tensor = call(
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
    slices: Sequence[int],
    layout: Sequence[int],
    impl: str,
) -> Tensor:
    rows = (indices, places) if bias is None else (indices, places, bias)
    asked = kept.ask((x, weight, entries, plan), rows, slices, layout, impl)
    if asked is not None:
        y = kept.repeat(asked, lambda: (weight, indices, places, plan, entries, *storages))
        if y is not None:
            return y
    routed = Routed(entries, storages, indices, places, plan, tuple(slices), Layout(*layout))
    problem = problem_of("lora_linear", x, routed, weight)
    choice = resolve(problem, impl, x.device)
    if x.shape[0] == 0 or not routed.has_adapters:
        return F.linear(x, weight, bias)
    if choice.impl == "torch":
        adapters = routed.adapters(x.shape[1], x.dtype)
        return reference.lora_linear(x, weight, adapters, indices, bias)
    if asked is None or choice.impl != "fused":
        return run_choice(choice, x, weight, bias, routed)
    return kept.keep(
        asked,
        choice,
        lambda: run_choice(choice, x, weight, bias, routed),
        problem,
        wanted_of(impl),
    )


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
    return run_fused(x, weight, bias, routed, choice.configs["shrink"], choice.configs["linear"])


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
