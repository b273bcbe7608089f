"""The plain product, and the product with the expand added onto its accumulator."""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex.checks import (
    REFERENCE_DTYPES,
    check_dtype,
    check_same,
    check_shape,
    check_tensor,
    dtype_name,
)
from loraplex.ops.gradient import without_backward
from loraplex.ops.impls import arch_of, check_impl, has_aligned_rows, precision_of, resolve
from loraplex.ops.library import register
from loraplex.reference import matmul as reference
from loraplex.tuning import Problem


def matmul(x: Tensor, c: Tensor, impl: str = "auto") -> Tensor:
    """Matrix product with float32 accumulation.

    Semantics: ``x @ c``.

    Args:
        x: [M, K]; c: [K, N], same dtype and device; any strides.
        impl: ``"auto"``, ``"torch"``, ``"triton"`` or ``"tiles"``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, device or shape.
        UnsupportedImplError: ``impl`` was named and cannot run here.

    Example:
        >>> import torch, loraplex as lp
        >>> lp.matmul(torch.ones(2, 3), torch.ones(3, 4)).tolist()
        [[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, 3.0, 3.0]]
    """
    _check_product(x, c, "c")
    check_impl("matmul", impl)

    def run() -> Tensor:
        w: Tensor = torch.ops.loraplex.matmul(x, c, impl)
        return w

    return without_backward("matmul", run, x, c)


def fused_matmul_expand(x: Tensor, c: Tensor, y: Tensor, b: Tensor, impl: str = "auto") -> Tensor:
    """Base product and expand in one kernel; the sum is rounded once and Y·B never reaches memory.

    Semantics: ``x @ c + y @ b``.

    Args:
        x: [M, K]; c: [K, N]; y: [M, R], the shrunk activations; b: [R, N]; one dtype and device;
            any strides.
        impl: ``"auto"``, ``"torch"``, ``"triton"`` or ``"tiles"``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, device or shape.
        UnsupportedImplError: ``impl`` was named and cannot run here.

    Example:
        >>> import torch, loraplex as lp
        >>> x, c, y, b = (torch.randn(*shape) for shape in ((4, 64), (64, 32), (4, 8), (8, 32)))
        >>> torch.allclose(lp.fused_matmul_expand(x, c, y, b), x @ c + y @ b, atol=1e-4)
        True
    """
    _check_product(x, c, "c")
    check_shape("y", check_tensor("y", y), [x.shape[0], "R"])
    check_same("y", y, "x", x)
    check_shape("b", check_tensor("b", b), [y.shape[1], c.shape[1]])
    check_same("b", b, "x", x)
    check_impl("matmul", impl)

    def run() -> Tensor:
        o: Tensor = torch.ops.loraplex.fused_matmul_expand(x, c, y, b, impl)
        return o

    return without_backward("fused_matmul_expand", run, x, c, y, b)


def _check_product(x: Tensor, c: Tensor, name: str) -> None:
    check_dtype("x", check_tensor("x", x), REFERENCE_DTYPES)
    check_shape("x", x, ["M", "K"])
    check_shape(name, check_tensor(name, c), [x.shape[1], "N"])
    check_same(name, c, "x", x)


def _is_vectorizable(*operands: Tensor) -> bool:
    """Whether each operand is dense and 16-byte aligned along one of its axes."""
    return all(has_aligned_rows(t) or has_aligned_rows(t.T) for t in operands)


def _matmul(x: Tensor, c: Tensor, impl: str) -> Tensor:
    return _run(x, c, None, None, impl)


def _fused_matmul_expand(x: Tensor, c: Tensor, y: Tensor, b: Tensor, impl: str) -> Tensor:
    return _run(x, c, y, b, impl)


def _run(x: Tensor, c: Tensor, y: Tensor | None, b: Tensor | None, impl: str) -> Tensor:
    problem = Problem(
        "matmul", x.shape[0], x.shape[1], (c.shape[1],), dtype=dtype_name(x.dtype),
        arch=arch_of(x.device), is_vectorizable=_is_vectorizable(x, c),
    )  # fmt: skip
    choice = resolve(problem, impl, x.device)
    if choice.impl == "torch":
        if y is None or b is None:
            return reference.matmul(x, c)
        return reference.fused_matmul_expand(x, c, y, b)
    from loraplex.kernels.matmul import launch_matmul

    o = torch.empty((x.shape[0], c.shape[1]), dtype=x.dtype, device=x.device)
    if o.numel():
        launch_matmul(x, c, y, b, o, precision=precision_of(x), **choice.configs["matmul"])
    return o


def _fake(x: Tensor, c: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], c.shape[1])


register("matmul(Tensor x, Tensor c, str impl) -> Tensor", _matmul, _fake)
register(
    "fused_matmul_expand(Tensor x, Tensor c, Tensor y, Tensor b, str impl) -> Tensor",
    _fused_matmul_expand,
    _fake,
)
