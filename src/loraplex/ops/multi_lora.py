"""The delta of many adapters alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex.ops.impls import resolve
from loraplex.ops.library import LAYOUT, ROUTED, register
from loraplex.ops.routed import Layout, Routed, check_routed, layout_of, problem_of, run_expand
from loraplex.reference import lora as reference
from loraplex.routing import Routing
from loraplex.table import AdapterTable
from loraplex.tuning.choose import Config


def multi_lora(
    x: Tensor,
    a_pool: Tensor,
    b_pool: Tensor,
    indices: Tensor | Sequence[int],
    scaling: Tensor | Sequence[float] | None = None,
    ranks: Tensor | Sequence[int] | None = None,
    slices: Sequence[int] | None = None,
    impl: str = "auto",
) -> Tensor:
    """What each token's adapter adds, zero for base rows; table and routing are built in the call.

    Semantics::

        d[m] = scaling[l] * (x[m] @ a_pool[l, :rank].T) @ b_pool[l, :, :rank].T  # l = indices[m]

    Args:
        x: [M, K]; a_pool: [L, S*R_max, K]; b_pool: [L, N, R_max]; indices: int [M], -1 = base only.
        scaling, ranks, slices: as in :meth:`AdapterTable.from_pools`.
        impl: ``"auto"``, ``"torch"``, ``"triton"``, ``"shrink_expand"`` or ``"one_launch"`` (a
            program per token and block of outputs, the form to learn from).

    Returns:
        [M, N] in the dtype of x.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, device or shape.
        UnsupportedImplError: ``impl`` was named and cannot run here.

    Example:
        >>> import torch, loraplex as lp
        >>> x, a, b = torch.randn(4, 128), torch.randn(3, 16, 128), torch.randn(3, 256, 16)
        >>> lp.multi_lora(x, a, b, torch.tensor([2, 0, 1, 2])).shape
        torch.Size([4, 256])
    """
    # ranks that lie on a GPU are not read here: a call must not wait for the device
    is_on_device = isinstance(ranks, Tensor) and ranks.device.type != "cpu"
    table = AdapterTable.from_pools(
        a_pool, b_pool, slices, scaling, ranks, rank_multiple=1 if is_on_device else None
    )
    device = indices.device if isinstance(indices, Tensor) else table.device
    if device.type == "cpu":
        device = table.device
    routing = Routing.from_indices(indices, num_adapters=table.num_adapters, device=device)
    check_routed(x, table, routing)
    d: Tensor = torch.ops.loraplex.multi_lora(
        x, table.entries, table.storages, routing.indices, routing.places, routing.plan,
        table.slices, layout_of(table), impl,
    )  # fmt: skip
    return d


def _multi_lora(
    x: Tensor,
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
    choice = resolve(problem_of("multi_lora", x, routed), impl, x.device)
    if x.shape[0] == 0 or not routed.has_adapters:
        return x.new_zeros(x.shape[0], sum(slices))
    if choice.impl == "torch":
        return reference.multi_lora(x, routed.adapters(x.shape[1], x.dtype), indices, sum(slices))
    if choice.impl == "one_launch":
        return _run_one_launch(x, routed, choice.configs["one_launch"])
    d = x.new_zeros(x.shape[0], sum(slices))
    run_expand(d, x, None, routed, choice.configs)
    return d


def _run_one_launch(x: Tensor, routed: Routed, config: Config) -> Tensor:
    from loraplex.kernels.multi_lora import launch_one_launch

    d = torch.empty((x.shape[0], sum(routed.slices)), dtype=x.dtype, device=x.device)
    launch_one_launch(
        x,
        routed.entries,
        routed.layout.a_inner_stride,
        routed.layout.b_inner_stride,
        routed.indices,
        d,
        slices=routed.slices,
        block_n=config["block_n"],
        block_k=config["block_k"],
        block_r=max(16, 1 << (routed.layout.max_rank - 1).bit_length()),
        num_warps=config["num_warps"],
    )
    return d


def _fake(
    x: Tensor,
    entries: Tensor,
    storages: list[Tensor],
    indices: Tensor,
    places: Tensor,
    plan: Tensor,
    slices: list[int],
    layout: list[int],
    impl: str,
) -> Tensor:
    return x.new_empty(x.shape[0], sum(slices))


register(f"multi_lora(Tensor x, {ROUTED}, {LAYOUT}) -> Tensor", _multi_lora, _fake)
