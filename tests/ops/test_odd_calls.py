"""Calls that are right but odd, and memory that only looks free."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import loraplex as lp

M, K, N, L, R = 6, 16, 24, 6, 8
ROWS = [2, 0, -1, 5, 2, -1]
IMPLS = ("torch", "fused", "gemm_add")


def draw(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device)


class TestAutocast:
    """A result has the dtype of x, and its precision, whatever autocast would do inside."""

    @pytest.fixture
    def arguments(self, device: torch.device) -> dict[str, object]:
        pools = draw(device, L, R, K), draw(device, L, N, R)
        return {
            "x": draw(device, M, K),
            "weight": draw(device, N, K),
            "table": lp.AdapterTable.from_pools(*pools),
            "routing": lp.Routing.from_indices(ROWS, num_adapters=L, device=device),
        }

    @pytest.mark.parametrize("impl", IMPLS)
    def test_lora_linear(self, impl: str, arguments: dict[str, object]) -> None:
        wanted = lp.lora_linear(**arguments, impl=impl)
        with torch.autocast(wanted.device.type, dtype=torch.bfloat16):
            assert (arguments["x"] @ arguments["x"].T).dtype == torch.bfloat16
            found = lp.lora_linear(**arguments, impl=impl)
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted)

    @pytest.mark.parametrize("impl", ["torch", "shrink_expand"])
    def test_add_lora_(self, impl: str, arguments: dict[str, object]) -> None:
        weight = arguments.pop("weight")
        y = arguments["x"] @ weight.T
        wanted = lp.add_lora_(y.clone(), **arguments, impl=impl)
        with torch.autocast(y.device.type, dtype=torch.bfloat16):
            assert lp.add_lora_(y, **arguments, impl=impl) is y
        assert torch.equal(y, wanted)

    @pytest.mark.parametrize("impl", ["torch", "tiles"])
    def test_products(self, impl: str, device: torch.device) -> None:
        x, c, y, b = (draw(device, *shape) for shape in ((M, K), (K, N), (M, R), (R, N)))
        wanted = lp.matmul(x, c, impl), lp.fused_matmul_expand(x, c, y, b, impl)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            found = lp.matmul(x, c, impl), lp.fused_matmul_expand(x, c, y, b, impl)
        for result, expected in zip(found, wanted, strict=True):
            assert result.dtype == torch.float32
            assert torch.equal(result, expected)

    def test_compiled(self, arguments: dict[str, object]) -> None:
        wanted = lp.lora_linear(**arguments, impl="triton")
        call = torch.compile(lp.lora_linear, fullgraph=True, backend="aot_eager")
        with torch.autocast(wanted.device.type, dtype=torch.bfloat16):
            found = call(**arguments, impl="triton")
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_pools_without_ranks_may_have_biases(impl: str, device: torch.device) -> None:
    """The same as ranks that are all zero: R_max = 0 takes the LoRA product away, nothing else."""
    x, weight, scale, bias = (draw(device, *shape) for shape in ((M, K), (N, K), (L, N), (L, N)))
    table = lp.AdapterTable.from_pools(
        draw(device, L, 0, K), draw(device, L, N, 0), column_scale=scale, bias=bias
    )
    routing = lp.Routing.from_indices(ROWS, num_adapters=L, device=device)
    base = x @ weight.T
    rows = torch.tensor(ROWS, device=device)
    wanted = torch.where((rows >= 0)[:, None], base * scale[rows] + bias[rows], base)
    y = lp.lora_linear(x, weight, table, routing, impl=impl)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    added = lp.add_lora_(base, x, table, routing, impl="torch" if impl == "torch" else "triton")
    torch.testing.assert_close(added, wanted, rtol=1e-4, atol=1e-4)


def test_meta_tensors_give_shapes() -> None:
    """What model loaders do before there is memory; no tensor there shares any."""
    meta = torch.device("meta")
    table = lp.AdapterTable.from_pools(draw(meta, L, R, K), draw(meta, L, N, R))
    routing = lp.Routing.from_indices(ROWS, num_adapters=L, device=meta)
    x, y = draw(meta, M, K), draw(meta, M, N)
    assert lp.lora_linear(x, draw(meta, N, K), table, routing).shape == (M, N)
    assert lp.add_lora_(y, x, table, routing) is y


def test_tracers_tensors_share_no_memory() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        table = lp.AdapterTable.from_pools(torch.randn(L, R, K), torch.randn(L, N, R))
        x, y = torch.randn(M, K), torch.randn(M, N)
        routing = lp.Routing.allocate(M, num_adapters=L, device="cpu")
        assert lp.add_lora_(y, x, table, routing) is y


def test_negated_inputs_are_read_as_they_are(device: torch.device) -> None:
    """x and weight may be views that torch negates when it reads them; kernels never see those."""
    pairs = [torch.randn(s, K, dtype=torch.complex64, device=device).conj().imag for s in (M, N)]
    assert all(tensor.is_neg() for tensor in pairs)
    table = lp.AdapterTable.from_pools(draw(device, L, R, K), draw(device, L, N, R))
    routing = lp.Routing.from_indices(ROWS, num_adapters=L, device=device)
    plain = [tensor.resolve_neg().contiguous() for tensor in pairs]
    y = lp.lora_linear(*pairs, table, routing, impl="triton")
    wanted = lp.lora_linear(*plain, table, routing, impl="triton")
    torch.testing.assert_close(y, wanted)


@pytest.mark.parametrize("slot", range(L))
def test_y_is_no_adapter_of_the_table(slot: int, device: torch.device) -> None:
    """Every tensor that a table holds is looked at, also the last of many."""
    table = lp.AdapterTable.allocate(
        L, K, [N], max_rank=R, dtype=torch.float32, device=device, rank_multiple=1
    )
    routing = lp.Routing.from_indices(ROWS, num_adapters=L, device=device)
    x, ups = draw(device, M, K), [draw(device, N, R) for _ in range(L)]
    y = ups[slot].view(-1)[: M * N].view(M, N)
    lp.add_lora_(y, x, table, routing)
    for other, up in enumerate(ups):
        table.set_(other, [draw(device, R, K)], [up])
    before = ups[slot].clone()
    with pytest.raises(ValueError, match="y must not share memory with the table's tensors"):
        lp.add_lora_(y, x, table, routing)
    assert torch.equal(ups[slot], before)
    table.clear_(slot)
    lp.add_lora_(y, x, table, routing)
