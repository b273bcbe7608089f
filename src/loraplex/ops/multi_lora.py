"""The delta of many adapters alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex.checks import (
    check_device,
    check_same,
    check_shape,
    check_slices,
    check_tensor,
    number_tensor,
)
from loraplex.ops.gradient import without_backward
from loraplex.ops.impls import check_impl, resolve
from loraplex.ops.library import register
from loraplex.ops.routed import Layout, Routed, check_routed, layout_of, problem_of, run_expand
from loraplex.reference import lora as reference
from loraplex.routing import Routing, index_tensor
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
    for name, value in (("x", x), ("a_pool", a_pool), ("b_pool", b_pool)):
        check_tensor(name, value)
    check_device("x", x, "a_pool", a_pool.device)
    check_same("b_pool", b_pool, "a_pool", a_pool)
    check_shape("b_pool", b_pool, ["L", "N", "R_max"])
    widths = check_slices(slices, b_pool.shape[1])
    check_impl("multi_lora", impl)
    slots = index_tensor(indices)
    factors = number_tensor("scaling", scaling, torch.float32)
    rows = number_tensor("ranks", ranks, torch.int64)
    for name, vector in (("indices", slots), ("scaling", factors), ("ranks", rows)):
        if vector is not None and vector.device.type != "cpu":
            check_device(name, vector, "a_pool", a_pool.device)

    def run() -> Tensor:
        d: Tensor = torch.ops.loraplex.multi_lora(
            x, a_pool, b_pool, slots, factors, rows, widths, impl
        )
        return d

    return without_backward("multi_lora", run, x, a_pool, b_pool)


def _multi_lora(
    x: Tensor,
    a_pool: Tensor,
    b_pool: Tensor,
    indices: Tensor,
    scaling: Tensor | None,
    ranks: Tensor | None,
    slices: list[int],
    impl: str,
) -> Tensor:
    # ranks that lie on a GPU are not read here: a call must not wait for the device
    is_on_device = ranks is not None and ranks.device.type != "cpu"
    table = AdapterTable.from_pools(
        a_pool, b_pool, slices, scaling, ranks, rank_multiple=1 if is_on_device else None
    )
    where = table.device if indices.device.type == "cpu" else indices.device
    routing = Routing.from_indices(indices, num_adapters=table.num_adapters, device=where)
    check_routed(x, table, routing)
    routed = Routed(
        table.entries, table.storages, routing.indices, routing.places, routing.plan, table.slices,
        Layout(*layout_of(table)),
    )  # fmt: skip
    choice = resolve(problem_of("multi_lora", x, routed), impl, x.device)
    n = table.out_features
    if x.shape[0] == 0 or not routed.has_adapters:
        return x.new_zeros(x.shape[0], n)
    if choice.impl == "torch":
        adapters = routed.adapters(x.shape[1], x.dtype)
        return reference.multi_lora(x, adapters, routing.indices, n)
    if choice.impl == "one_launch":
        return _run_one_launch(x, routed, choice.configs["one_launch"])
    d = x.new_zeros(x.shape[0], n)
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


def _fake(x: Tensor, a_pool: Tensor, b_pool: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], b_pool.shape[1])


register(
    "multi_lora(Tensor x, Tensor a_pool, Tensor b_pool, Tensor indices, Tensor? scaling, "
    "Tensor? ranks, int[] slices, str impl) -> Tensor",
    _multi_lora,
    _fake,
)
