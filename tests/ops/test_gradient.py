"""A backward pass through an op raises: it must not give the gradient of the base layer alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import loraplex as lp
from loraplex.ops.impls import TRITON_IMPLS


def call(op: str, x: Tensor, weight: Tensor, impl: str) -> Tensor:
    a, b = torch.randn(2, 8, 32, device=x.device), torch.randn(2, 16, 8, device=x.device)
    indices = torch.tensor([0, -1, 1, 0])
    table = lp.AdapterTable.from_pools(a, b)
    routing = lp.Routing.from_indices(indices, num_adapters=2, device=x.device)
    calls: dict[str, Callable[[], Tensor]] = {
        "lora_linear": lambda: lp.lora_linear(x, weight, table, routing, impl=impl),
        "add_lora": lambda: lp.add_lora_(F.linear(x, weight), x, table, routing, impl=impl),
        "multi_lora": lambda: lp.multi_lora(x, a, b, indices, impl=impl),
        "matmul": lambda: lp.matmul(x, weight.T, impl=impl),
    }
    return calls[op]()


@pytest.mark.parametrize(
    ("op", "impl"), [(op, impl) for op in TRITON_IMPLS for impl in ("torch", *TRITON_IMPLS[op])]
)
def test_backward_raises_and_forward_does_not(op: str, impl: str, device: torch.device) -> None:
    x = torch.randn(4, 32, device=device)
    weight = torch.randn(16, 32, device=device)
    torch.manual_seed(0)
    expected = call(op, x, weight, impl)
    x.requires_grad_()
    torch.manual_seed(0)
    result = call(op, x, weight, impl)
    assert torch.equal(result, expected)
    with pytest.raises(RuntimeError, match=rf"loraplex\.{op}.*computes no gradients"):
        result.sum().backward()
    with torch.no_grad():
        assert not call(op, x, weight, impl).requires_grad
