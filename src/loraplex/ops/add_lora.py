"""y += LoRA part, in place onto any base output."""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex.checks import check_disjoint, check_no_overlap, check_same, check_shape, check_tensor
from loraplex.ops.gradient import without_backward
from loraplex.ops.impls import check_impl, resolve
from loraplex.ops.library import LAYOUT, ROUTED, register
from loraplex.ops.routed import (
    Layout,
    Routed,
    check_bias,
    check_routed,
    layout_of,
    problem_of,
    run_expand,
)
from loraplex.reference import lora as reference
from loraplex.routing import Routing
from loraplex.table import AdapterTable


def add_lora_(
    y: Tensor,
    x: Tensor,
    table: AdapterTable,
    routing: Routing,
    bias: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Add every token's own LoRA part to a base output, in place.

    Semantics, for row m with adapter l in slice s; rows of index -1 are not touched::

        y[m] = column_scale[l] * (y[m] - bias + scaling[l] * (x[m] @ A[l].T) @ B[l].T)
               + bias + adapter_bias[l]

    Args:
        y: [M, N], what the base layer gave (quantised or not); any strides, no overlap.
        x: [M, K], the layer's input, dtype of the table.
        table: adapters of this layer; routing: adapter of each token.
        bias: [N], the layer's bias that ``y`` holds already; matters for column scales (DoRA) only.
        impl: ``"auto"``, ``"torch"``, ``"triton"`` or ``"shrink_expand"``.

    Returns:
        ``y``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, device or shape, or y overlaps
            itself, x or bias; y is unchanged then.
        UnsupportedImplError: ``impl`` was named and cannot run here.

    Example:
        >>> import torch, loraplex as lp
        >>> x, weight = torch.randn(4, 64), torch.randn(32, 64)
        >>> table = lp.AdapterTable.from_pools(torch.randn(3, 8, 64), torch.randn(3, 32, 8))
        >>> routing = lp.Routing.from_indices([2, 0, -1, 2], num_adapters=3)
        >>> y = x @ weight.T
        >>> torch.equal(lp.add_lora_(y, x, table, routing)[2], (x @ weight.T)[2])
        True
    """
    check_routed(x, table, routing)
    check_tensor("y", y)
    check_shape("y", y, [x.shape[0], table.out_features])
    check_same("y", y, "x", x)
    check_bias(bias, x, table.out_features)
    check_impl("add_lora", impl)
    if not torch.compiler.is_compiling():
        if not y.is_contiguous():
            check_no_overlap("y", y)
        check_disjoint("y", y, "x", x)
        if bias is not None:
            check_disjoint("y", y, "bias", bias)
        if not table.is_clear_of(y):
            for storage in table.storages:
                check_disjoint("y", y, "the table's tensors", storage)

    def run() -> Tensor:
        torch.ops.loraplex.add_lora_(
            y, x, bias, table.entries, table.storages, routing.indices, routing.places,
            routing.plan, table.slices, layout_of(table), impl,
        )  # fmt: skip
        return y

    return without_backward("add_lora_", run, y, x, bias)


def _add_lora_(
    y: Tensor,
    x: Tensor,
    bias: Tensor | None,
    entries: Tensor,
    storages: list[Tensor],
    indices: Tensor,
    places: Tensor,
    plan: Tensor,
    slices: list[int],
    layout: list[int],
    impl: str,
) -> None:
    routed = Routed(entries, storages, indices, places, plan, tuple(slices), Layout(*layout))
    choice = resolve(problem_of("add_lora", x, routed), impl, x.device)
    if x.shape[0] == 0 or not routed.has_adapters:
        return
    if choice.impl == "torch":
        reference.add_lora_(y, x, routed.adapters(x.shape[1], x.dtype), indices, bias)
    else:
        run_expand(y, x, bias, routed, choice.configs)


def _fake(y: Tensor, *_: object) -> None:
    return None


register(
    f"add_lora_(Tensor(a!) y, Tensor x, Tensor? bias, {ROUTED}, {LAYOUT}) -> ()", _add_lora_, _fake
)
