"""The registered torch ops: schema, fake, and torch.compile of whole functions that call them."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import loraplex as lp
from loraplex.ops.routed import layout_of
from loraplex.testing import CASES, Case, Inputs, build

CASE = Case("compiled", m=5, k=32, slices=(24, 8), ranks=(8, 16), indices=(1, -1, 0, 1, -1))
EXTRAS = Case(
    "compiled_extras", m=5, k=32, slices=(24, 8), ranks=(8, 5), indices=(1, -1, 0, 1, -1),
    has_bias=True, has_column_scale=True, has_adapter_bias=True,
)  # fmt: skip
BACKENDS = ("eager", "aot_eager")
IMPLS = ("torch", "triton")


def routed_arguments(inputs: Inputs, impl: str) -> tuple[object, ...]:
    table, routing = inputs.table, inputs.routing
    return (
        table.entries, table.storages, *routed_tensors(routing), list(table.slices),
        layout_of(table), impl,
    )  # fmt: skip


def routed_tensors(routing: lp.Routing) -> tuple[Tensor, ...]:
    """What the schema takes of a routing, by the names it has there."""
    names = [argument.name for argument in torch.ops.loraplex.lora_linear.default._schema.arguments]
    first, last = names.index("storages") + 1, names.index("slices")
    return tuple(getattr(routing, name) for name in names[first:last])


@pytest.fixture(params=[CASE, EXTRAS], ids=str)
def inputs(request: pytest.FixtureRequest, device: torch.device) -> Inputs:
    return build(request.param, torch.float32, device)


class TestOpcheck:
    """With a table, ``impl="triton"`` alone: torch copies the arguments, the pointers stay as they

    were, and the torch reference, unlike a kernel, refuses those.
    """

    def test_lora_linear(self, inputs: Inputs) -> None:
        torch.library.opcheck(
            torch.ops.loraplex.lora_linear.default,
            (inputs.x, inputs.weight, inputs.bias, *routed_arguments(inputs, "triton")),
        )

    def test_add_lora_(self, inputs: Inputs) -> None:
        torch.library.opcheck(
            torch.ops.loraplex.add_lora_.default,
            (inputs.y, inputs.x, inputs.bias, *routed_arguments(inputs, "triton")),
        )

    def test_K27_add_lora_to_a_view(self, inputs: Inputs) -> None:
        y = inputs.y.new_zeros(5, 99)[:, 3:35]
        torch.library.opcheck(
            torch.ops.loraplex.add_lora_.default,
            (y, inputs.x, inputs.bias, *routed_arguments(inputs, "triton")),
        )

    @pytest.mark.parametrize("impl", IMPLS)
    def test_multi_lora(self, impl: str, device: torch.device) -> None:
        inputs = build(CASE, torch.float32, device)
        a, b, scaling, ranks = inputs.pools
        torch.library.opcheck(
            torch.ops.loraplex.multi_lora.default,
            (inputs.x, a, b, inputs.indices, scaling, ranks, [24, 8], impl),
        )

    @pytest.mark.parametrize("impl", IMPLS)
    def test_matmul(self, impl: str, device: torch.device) -> None:
        x, c = torch.randn(5, 16, device=device), torch.randn(16, 8, device=device)
        torch.library.opcheck(torch.ops.loraplex.matmul.default, (x, c, impl))

    @pytest.mark.parametrize("impl", IMPLS)
    def test_fused_matmul_expand(self, impl: str, device: torch.device) -> None:
        x, c = torch.randn(5, 16, device=device), torch.randn(16, 8, device=device)
        torch.library.opcheck(
            torch.ops.loraplex.fused_matmul_expand.default, (x, c, x[:, :4], c[:4], impl)
        )


def test_every_op_is_checked() -> None:
    registered = {
        name.removeprefix("loraplex::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("loraplex::")
        # an engine's plugin has ops of its own, known once it is imported; its tests compile them
        and not name.startswith("loraplex::vllm_")
    }
    source = inspect.getsource(TestOpcheck)
    assert registered, "no op is registered"
    assert {name for name in registered if f"loraplex.{name}.default" not in source} == set()


def compiled(function: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("backend", BACKENDS)
class TestCompile:
    def test_lora_linear(self, inputs: Inputs, impl: str, backend: str) -> None:
        def layer(x: Tensor) -> Tensor:
            y = lp.lora_linear(
                x * 2, inputs.weight, inputs.table, inputs.routing, inputs.bias, impl=impl
            )
            return torch.relu(y)

        assert torch.equal(compiled(layer, backend)(inputs.x), layer(inputs.x))

    def test_add_lora_(self, inputs: Inputs, impl: str, backend: str) -> None:
        def layer(x: Tensor) -> Tensor:
            y = torch.nn.functional.linear(x, inputs.weight, inputs.bias)
            lp.add_lora_(y, x, inputs.table, inputs.routing, inputs.bias, impl=impl)
            return y * 2

        assert torch.equal(compiled(layer, backend)(inputs.x), layer(inputs.x))

    def test_K27_view_of_a_graph_input(self, inputs: Inputs, impl: str, backend: str) -> None:
        def layer(buffer: Tensor, x: Tensor) -> Tensor:
            lp.add_lora_(buffer[:, 3:35], x, inputs.table, inputs.routing, inputs.bias, impl=impl)
            return buffer.sum(dim=1)

        expected = torch.randn(5, 40, device=inputs.x.device)
        buffer = expected.clone()
        total = layer(expected, inputs.x)
        assert torch.equal(compiled(layer, backend)(buffer, inputs.x), total)
        assert torch.equal(buffer, expected)

    def test_multi_lora(self, impl: str, backend: str, device: torch.device) -> None:
        inputs = build(CASE, torch.float32, device)
        a, b, scaling, ranks = inputs.pools

        def delta(x: Tensor, indices: Tensor) -> Tensor:
            return 2 * lp.multi_lora(x, a, b, indices, scaling, ranks, (24, 8), impl=impl)

        arguments = (inputs.x, inputs.indices)
        assert torch.equal(compiled(delta, backend)(*arguments), delta(*arguments))

    def test_products(self, impl: str, backend: str, device: torch.device) -> None:
        def both(x: Tensor, c: Tensor) -> Tensor:
            y = lp.matmul(x, c, impl=impl)
            return lp.fused_matmul_expand(x, c, y[:, :4], c[:4], impl=impl)

        x, c = torch.randn(5, 16, device=device), torch.randn(16, 8, device=device)
        assert torch.equal(compiled(both, backend)(x, c), both(x, c))


def test_compiled_layer_sees_new_tokens_and_adapters(device: torch.device) -> None:
    """Routing and table change in place, so what was compiled once stays right."""
    inputs = build(next(c for c in CASES if c.name == "set"), torch.float32, device)

    def layer(x: Tensor) -> Tensor:
        return lp.lora_linear(x, inputs.weight, inputs.table, inputs.routing, impl="torch")

    fast = compiled(layer, "eager")
    first = fast(inputs.x)
    inputs.routing.update_([0, 0, -1, 1, 2, 2, -1])
    second = fast(inputs.x)
    assert torch.equal(second, layer(inputs.x))
    inputs.table.clear_(0)
    third = fast(inputs.x)
    assert torch.equal(third, layer(inputs.x))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_bad_arguments_are_errors_while_compiling_too(device: torch.device) -> None:
    inputs = build(CASE, torch.float32, device)
    layer = compiled(
        lambda x: lp.lora_linear(x, inputs.weight, inputs.table, inputs.routing), "eager"
    )
    with pytest.raises(Exception, match=r"x must have shape \[M, 32\]"):
        layer(inputs.x[:, 1:])
