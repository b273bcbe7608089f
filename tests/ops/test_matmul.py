"""``matmul`` and ``fused_matmul_expand`` against float64, on the same rows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import loraplex as lp
from loraplex.bench.verdict import judge
from loraplex.ops.impls import TRITON_IMPLS
from loraplex.testing import lay_out

IMPLS = ("torch", *TRITON_IMPLS["matmul"])
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Product:
    """x [M, K] @ c [K, N] (+ y [M, R] @ b [R, N]); x and y in one layout, c and b in another."""

    name: str
    m: int = 5
    k: int = 48
    n: int = 40
    r: int = 8
    left: str = "dense"
    right: str = "dense"
    is_large: bool = False

    def __str__(self) -> str:
        return self.name


PRODUCTS = (
    Product("plain"),
    Product("K30_rows_0", m=0),
    Product("k_0", k=0),
    Product("n_0", n=0),
    Product("r_0", r=0),
    Product("ones", m=1, k=1, n=1, r=1),
    Product("odd", m=17, k=37, n=29, r=5),
    Product("over_blocks", m=130, k=140, n=70, r=20),
    Product("over_groups", m=330, k=8, n=70, r=3),
    Product("r_over_blocks", r=40),
    Product("right_transposed", right="transposed"),
    Product("left_transposed", left="transposed"),
    Product("left_wide", left="wide"),
    Product("left_odd", left="odd"),
    Product("right_odd", right="odd"),
    Product("all_stepped", left="stepped", right="stepped"),
    Product("gate_up", 64, 4096, 28672, 8, is_large=True),
    Product("prefill", 2048, 4096, 4096, 64, is_large=True),
)


def tensors(product: Product, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """x, c, y, b."""
    m, k, n, r = product.m, product.k, product.n, product.r
    shapes = ((m, k), (k, n), (m, r), (r, n))
    layouts = (product.left, product.right) * 2
    scales = (1.0, max(k, 1) ** -0.5, 1.0, max(r, 1) ** -0.5)
    return [
        lay_out((scale * torch.randn(shape, device=device)).to(dtype), layout)
        for shape, layout, scale in zip(shapes, layouts, scales, strict=True)
    ]


@pytest.mark.parametrize("is_fused", [False, True], ids=["matmul", "fused_matmul_expand"])
@pytest.mark.parametrize(
    ("impl", "dtype", "product"),
    [
        pytest.param(
            impl,
            DTYPES[dtype],
            product,
            id=f"{impl}-{dtype}-{product}",
            marks=[pytest.mark.gpu]
            if product.is_large or (dtype == "bf16" and impl != "torch")
            else [],
        )
        for impl in IMPLS
        for dtype in DTYPES
        for product in PRODUCTS
    ],
)
def test_result(
    impl: str, dtype: torch.dtype, product: Product, is_fused: bool, device: torch.device
) -> None:
    x, c, y, b = tensors(product, dtype, device)
    truth = x.double() @ c.double()
    if is_fused:
        result = lp.fused_matmul_expand(x, c, y, b, impl=impl)
        truth += y.double() @ b.double()
        eager = x @ c + y @ b
    else:
        result, eager = lp.matmul(x, c, impl=impl), x @ c
    assert (result.shape, result.dtype, result.device) == (eager.shape, dtype, x.device)
    if result.numel():
        verdict = judge(result, eager, truth)
        assert verdict.is_correct, str(verdict)


@pytest.mark.parametrize("impl", IMPLS)
def test_x_with_one_row_for_all(impl: str, device: torch.device) -> None:
    """K18: strides of 0 are strides like any other."""
    row, c = torch.randn(1, 48, device=device), torch.randn(48, 20, device=device)
    x = row.expand(5, 48)
    dense = lp.matmul(x.contiguous(), c, impl=impl)
    torch.testing.assert_close(lp.matmul(x, c, impl=impl), dense)


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_choices(impl: str, device: torch.device) -> None:
    x, c, y, b = tensors(Product("plain"), torch.float32, device)
    result = lp.fused_matmul_expand(x, c, y, b, impl=impl)
    torch.testing.assert_close(result, x @ c + y @ b)


def test_float64_is_for_the_reference(device: torch.device) -> None:
    x, c, *_ = tensors(Product("plain"), torch.float64, device)
    assert torch.equal(lp.matmul(x, c), x @ c)
    with pytest.raises(lp.UnsupportedImplError, match="float64"):
        lp.matmul(x, c, impl="triton")
