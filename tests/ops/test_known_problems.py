"""Problems that users of LoRA kernels hit elsewhere, one test or more each.

| row | problem | where |
| --- | --- | --- |
| K02 | slot times slot stride overflows 32 bits | here |
| K03 | fewer than 16 rows | here |
| K04 | ranks below 16 | cases of ``loraplex.testing`` |
| K05 | ranks 5 and 8 in one batch | cases |
| K06 | wrong numbers at some ranks | cases |
| K07 | first outputs of a segment right, the rest wrong | here |
| K08 | sizes that no block divides, bytes past rows | cases; tests/kernels/test_memory.py |
| K09 | index -1 selects the last slot | here, cases |
| K10 | base rows get what was there before | here, tests/test_routing.py |
| K11 | more indices than rows | test_bad_inputs.py |
| K12 | graph captured with one adapter, replayed with several | test_graphs.py |
| K16 | NaN for rows from 128 on | here, cases |
| K18 | axes of size 1 with odd strides | here, cases, tests/test_table.py |
| K20 | a row's result depends on its neighbours | here |
| K21 | a pool of capacity 256 and more | cases |
| K23 | the float16 intermediate overflows | here |
| K24 | bfloat16 dots are wrong in the interpreter | test_bad_inputs.py |
| K26 | float32 everywhere, or in part | test_bad_inputs.py; every case runs in float32 |
| K27 | mutating op on a view under torch.compile | test_registered.py |
| K28 | tensor-parallel shards | here |
| K30 | no rows, no adapters, empty pool | here, cases |
| K31 | forms of the indices | cases, tests/test_routing.py |
| K32 | more shared memory than the device has | tests/tuning/test_tables.py |
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import loraplex as lp
from loraplex.bench.verdict import judge
from loraplex.errors import UnsupportedImplError
from loraplex.ops.impls import TRITON_IMPLS
from loraplex.testing import CASES, GENERAL_IMPLS, Case, Inputs, build, oracles

LINEAR = ("torch", *TRITON_IMPLS["lora_linear"])
ADD = ("torch", *TRITON_IMPLS["add_lora"])
MULTI = ("torch", *TRITON_IMPLS["multi_lora"])
Shard = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
MAP_NORESERVE = 0x4000  # the mmap module names it from Python 3.13 on


def test_every_row_is_tested() -> None:
    """The table above names rows; each has a test or a case whose id carries it."""
    root = Path(__file__).parents[2]
    sources = [*(root / "tests").rglob("*.py"), root / "src" / "loraplex" / "testing" / "case.py"]
    text = "\n".join(path.read_text() for path in sources)
    tested = set(re.findall(r"(?:def test_|Product\(\"|Case\(\"|\")(K\d\d)_", text))
    rows = set(re.findall(r"^\| (K\d\d) \|", __doc__ or "", flags=re.MULTILINE))
    assert len(rows) == 23
    assert rows - tested == set()


def linear(
    x: Tensor, weight: Tensor, table: lp.AdapterTable, routing: lp.Routing, impl: str
) -> Tensor:
    """``lora_linear``; a special implementation may refuse."""
    try:
        return lp.lora_linear(x, weight, table, routing, impl=impl)
    except UnsupportedImplError as refusal:
        if impl in GENERAL_IMPLS:
            raise
        pytest.skip(str(refusal))


def sparse(elements: int, device: torch.device) -> Tensor:
    """float16 zeros that take memory only where somebody writes."""
    if device.type != "cpu":
        return torch.zeros(elements, dtype=torch.float16, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.float16)


class TestK02OffsetsPast32Bits:
    """Addresses are computed in 64 bits: slots, rows and columns past 2**31 elements."""

    K, N, R = 16, 24, 8

    @pytest.mark.parametrize("impl", MULTI)
    def test_K02_slot_319(self, impl: str, device: torch.device) -> None:
        slots, stride = 320, 2560 * 3072
        memory = sparse(slots * stride, device)
        a = memory.as_strided((slots, self.R, self.K), (stride, self.K, 1))
        b = memory.as_strided((slots, self.N, self.R), (stride, self.R, 1), 4096)
        a[319], b[319] = torch.randn(self.R, self.K) / 4, torch.randn(self.N, self.R) / 3
        x = torch.randn(3, self.K, device=device).half()
        d = lp.multi_lora(x, a, b, [319, -1, 319], impl=impl)
        eager = x @ a[319].T @ b[319].T
        truth = x.double() @ a[319].double().T @ b[319].double().T
        truth[1] = eager[1] = 0
        assert_right(d, eager, truth)

    @pytest.mark.parametrize("impl", MULTI)
    @pytest.mark.parametrize("far", ["x", "a", "b"])
    def test_K02_inner_strides(self, far: str, impl: str, device: torch.device) -> None:
        near = {
            "x": torch.randn(3, self.K, device=device).half(),
            "a": (torch.randn(2, self.R, self.K, device=device) / 4).half(),
            "b": (torch.randn(2, self.N, self.R, device=device) / 3).half(),
        }
        shape = near[far].shape
        step = 2**31 // (shape[-1] - 1) // 8 * 8 + 64
        strides = (shape[-2], 1, step)[-len(shape) :]
        there = sparse(step * shape[-1], device).as_strided(shape, strides).copy_(near[far])
        wanted = lp.multi_lora(near["x"], near["a"], near["b"], [1, -1, 0], impl=impl)
        tensors = near | {far: there}
        found = lp.multi_lora(tensors["x"], tensors["a"], tensors["b"], [1, -1, 0], impl=impl)
        torch.testing.assert_close(found, wanted)

    @pytest.mark.parametrize("impl", LINEAR)
    @pytest.mark.parametrize("far", ["x_rows", "x_columns", "weight_rows", "weight_columns"])
    def test_K02_strides(self, far: str, impl: str, device: torch.device) -> None:
        case = Case(f"K02_{far}", m=5, k=self.K, slices=(self.N,), ranks=(8, 8))
        inputs = build(case, torch.float16, device)
        name, _, axis = far.partition("_")
        near = inputs.x if name == "x" else inputs.weight
        step = 2**31 // (near.shape[axis == "columns"] - 1) // 8 * 8 + 8
        strides = (step, 1) if axis == "rows" else (1, step)
        memory = sparse(step * near.shape[axis == "columns"], device)
        there = memory.as_strided(near.shape, strides).copy_(near)
        tensors = {"x": inputs.x, "weight": inputs.weight} | {name: there}
        found = linear(tensors["x"], tensors["weight"], inputs.table, inputs.routing, impl)
        wanted = linear(inputs.x, inputs.weight, inputs.table, inputs.routing, impl)
        torch.testing.assert_close(found, wanted)

    @pytest.mark.parametrize("impl", ADD)
    @pytest.mark.parametrize("axis", ["rows", "columns"])
    def test_K02_y(self, axis: str, impl: str, device: torch.device) -> None:
        case = Case("K02_y", m=5, k=self.K, slices=(self.N,), ranks=(8, 8))
        inputs = build(case, torch.float16, device)
        size = case.m if axis == "rows" else self.N
        step = 2**31 // (size - 1) // 8 * 8 + 8
        strides = (step, 1) if axis == "rows" else (1, step)
        y = sparse(step * size, device).as_strided(inputs.y.shape, strides).copy_(inputs.y)
        lp.add_lora_(y, inputs.x, inputs.table, inputs.routing, impl=impl)
        wanted = lp.add_lora_(inputs.y, inputs.x, inputs.table, inputs.routing, impl=impl)
        torch.testing.assert_close(y, wanted)

    @pytest.mark.gpu
    @pytest.mark.parametrize("impl", LINEAR)
    def test_K02_large_output(self, impl: str, device: torch.device) -> None:
        m, n = 33_000, 65_600
        x = torch.randn(m, 64, device=device, dtype=torch.bfloat16)
        weight = torch.randn(n, 64, device=device, dtype=torch.bfloat16)
        a, b = torch.randn(1, 16, 64, device=device), torch.randn(1, n, 16, device=device)
        table = lp.AdapterTable.from_pools(a.bfloat16(), b.bfloat16())
        routing = lp.Routing.from_indices(
            torch.zeros(m, dtype=torch.int32, device=device), num_adapters=1
        )
        last = linear(x, weight, table, routing, impl)[-9:]
        routing_9 = lp.Routing.from_indices([0] * 9, num_adapters=1, device=device)
        alone = lp.lora_linear(x[-9:], weight, table, routing_9, impl="torch")
        torch.testing.assert_close(last, alone, rtol=2e-2, atol=0.5)  # sums of 80 products of ~8


def assert_right(result: Tensor, eager: Tensor, truth: Tensor) -> None:
    verdict = judge(result, eager, truth)
    assert verdict.is_correct, str(verdict)


@pytest.mark.parametrize("impl", LINEAR)
def test_K03_fewer_than_16_rows(impl: str, device: torch.device) -> None:
    for rows in (1, 2, 3, 8, 15):
        case = Case(f"K03_{rows}", m=rows, k=64, slices=(40,), ranks=(32,), indices="identical")
        inputs = build(case, torch.float16, device)
        result = linear(inputs.x, inputs.weight, inputs.table, inputs.routing, impl)
        assert_right(
            result, oracles.eager("lora_linear", inputs), oracles.truth("lora_linear", inputs)
        )


@pytest.mark.parametrize("impl", MULTI)
def test_K07_segments(impl: str, device: torch.device) -> None:
    """x (3, 64), two weights (64, 32), segments [0, 1, 3]: with B = 1 the delta is x @ w."""
    x = torch.randn(3, 64, device=device).half()
    weights = torch.randn(2, 64, 32, device=device).half()
    one = torch.eye(32, dtype=torch.float16, device=device).expand(2, 32, 32)
    d = lp.multi_lora(x, weights.mT, one, [0, 1, 1], impl=impl)
    eager = torch.cat([x[:1] @ weights[0], x[1:] @ weights[1]])
    truth = torch.cat([x[:1].double() @ weights[0].double(), x[1:].double() @ weights[1].double()])
    assert_right(d, eager, truth)


@pytest.mark.parametrize("impl", LINEAR)
def test_K09_minus_one_is_not_the_last_slot(impl: str, device: torch.device) -> None:
    case = next(case for case in CASES if case.name == "K09_one_slot")
    inputs = build(case, torch.float16, device)
    y = linear(inputs.x, inputs.weight, inputs.table, inputs.routing, impl)
    nobody = lp.Routing.from_indices([-1] * 4, num_adapters=1, device=device)
    base = linear(inputs.x, inputs.weight, inputs.table, nobody, impl)
    assert torch.equal(y[[0, 2]], base[[0, 2]])
    assert not torch.isclose(y[[1, 3]], base[[1, 3]]).all(dim=1).any()
    if impl in ("torch", "gemm_add"):
        assert torch.equal(base, F.linear(inputs.x, inputs.weight))


@pytest.mark.parametrize("impl", LINEAR)
def test_K10_base_rows_after_an_adapter_s_rows(impl: str, device: torch.device) -> None:
    """Same buffers: 64 rows of slot 0, then 8 base rows, then both."""
    case = Case("K10", m=64, k=32, slices=(24,), ranks=(8, 16), indices="identical")
    inputs = build(case, torch.float16, device)
    base_only = lp.Routing.allocate(64, num_adapters=2, device=device)
    used = lp.Routing.allocate(64, num_adapters=2, device=device)

    def run(x: Tensor, routing: lp.Routing) -> Tensor:
        return linear(x, inputs.weight, inputs.table, routing, impl)

    run(inputs.x, used.update_([0] * 64))
    x = inputs.x[:8]
    base = run(x, base_only.update_([-1] * 8))
    assert torch.equal(run(x, used.update_([-1] * 8)), base)
    mixed = run(x, used.update_([0, -1] * 4))
    assert torch.equal(mixed[1::2], base[1::2])
    assert not torch.isclose(mixed[::2], base[::2]).all(dim=1).any()


@pytest.mark.parametrize("impl", ADD)
def test_K16_rank_64_around_128_rows(impl: str, device: torch.device) -> None:
    for rows in (127, 128, 129):
        case = Case(f"K16_{rows}", m=rows, k=32, slices=(16,), ranks=(64,), indices="identical")
        inputs = build(case, torch.float16, device)
        result = inputs.run("add_lora", impl)
        assert result.isfinite().all()
        assert_right(result, oracles.eager("add_lora", inputs), oracles.truth("add_lora", inputs))


@pytest.mark.parametrize("impl", LINEAR)
@pytest.mark.parametrize("stride", [0, 7 * 48, 3])
def test_K18_one_row_with_any_stride(stride: int, impl: str, device: torch.device) -> None:
    case = Case("K18", m=1, indices=(1,))
    inputs = build(case, torch.float16, device)
    x = inputs.x.as_strided((1, 48), (stride, 1))
    assert x.is_contiguous()
    y = linear(x, inputs.weight, inputs.table, inputs.routing, impl)
    torch.testing.assert_close(
        y, linear(inputs.x, inputs.weight, inputs.table, inputs.routing, impl)
    )


@pytest.mark.parametrize("impl", LINEAR)
def test_K20_a_row_alone_in_company_and_permuted(impl: str, device: torch.device) -> None:
    """Each result obeys the same rule as all others; equal bits are not promised yet."""
    case = Case("K20", m=129, k=32, slices=(16,), ranks=(8, 16, 8), indices="mixed")
    inputs = build(case, torch.float16, device)
    eager = oracles.eager("lora_linear", inputs)
    truth = oracles.truth("lora_linear", inputs)

    def check(rows: Tensor) -> None:
        indices = inputs.indices[rows]
        routing = lp.Routing.from_indices(indices, num_adapters=3, device=device)
        y = linear(inputs.x[rows], inputs.weight, inputs.table, routing, impl)
        bound = judge(y, eager[rows], truth[rows]).max_error
        assert bound <= judge(eager, eager, truth).bound

    everybody = torch.arange(129, device=device)
    for rows in (everybody[5:6], everybody[:64], everybody, everybody.flip(0)):
        check(rows)


def scaled(impls: tuple[str, ...]) -> list[object]:
    """Implementations times scales of the adapter, one that makes the intermediate fit."""
    in_float16 = pytest.mark.xfail(
        reason="between shrink and expand the scaled x A^T is rounded to float16"
    )
    return [
        pytest.param(
            impl,
            scale,
            id=f"{impl}-scale_{scale}",
            marks=[] if scale < 1 or impl in ("torch", "one_launch") else [in_float16],
        )
        for impl in impls
        for scale in (1 / 64, 1.0)
    ]


class TestK23Float16Overflow:
    """x Aᵀ = 131072 does not fit in float16; the result does."""

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.full((2, 4096), 16.0, dtype=torch.float16, device=device)
        a = torch.full((1, 8, 4096), 2.0, dtype=torch.float16, device=device)
        return x, a, torch.full((1, 16, 8), 2.0**-14, dtype=torch.float16, device=device)

    def check(self, result: Tensor, scale: float) -> None:
        expected = torch.tensor([[131072 * 8 * 2.0**-14 * scale], [0.0]], device=result.device)
        torch.testing.assert_close(result.float(), expected.expand(2, 16))

    @pytest.mark.parametrize(("impl", "scale"), scaled(MULTI))
    def test_K23_multi_lora(self, impl: str, scale: float, device: torch.device) -> None:
        x, a, b = self.tensors(device)
        self.check(lp.multi_lora(x, a, b, [0, -1], scaling=[scale], impl=impl), scale)

    @pytest.mark.parametrize(("impl", "scale"), scaled(LINEAR))
    def test_K23_lora_linear(self, impl: str, scale: float, device: torch.device) -> None:
        x, a, b = self.tensors(device)
        weight = torch.zeros(16, 4096, dtype=torch.float16, device=device)
        table = lp.AdapterTable.from_pools(a, b, scaling=[scale])
        routing = lp.Routing.from_indices([0, -1], num_adapters=1, device=device)
        self.check(linear(x, weight, table, routing, impl), scale)


@pytest.mark.parametrize("impl", LINEAR)
@pytest.mark.parametrize("rank", [8, 6])
@pytest.mark.parametrize("shards", [2, 4])
class TestK28Shards:
    """Tensor parallelism: q splits B by rows, o splits A by columns; ranks come from tensors."""

    SLICES = (32, 16)

    def inputs(self, rank: int, device: torch.device) -> Inputs:
        case = Case("K28", m=5, k=64, slices=self.SLICES, ranks=(rank, rank), indices="mixed")
        return build(case, torch.float32, device)

    def layer(
        self, x: Tensor, weight: Tensor, inputs: Inputs, shard: Shard, impl: str
    ) -> tuple[Tensor, ...]:
        """One shard's outputs by slice; its table has views of the whole adapters."""
        pairs = {
            slot: [shard(part.a, part.b) for part in parts]
            for slot, parts in inputs.adapters.items()
        }
        widths = [b.shape[0] for _, b in pairs[0]]
        table = lp.AdapterTable.allocate(
            2, x.shape[1], widths, max_rank=8, dtype=x.dtype, device=x.device, rank_multiple=1
        )
        for slot, parts in inputs.adapters.items():
            a, b = zip(*pairs[slot], strict=True)
            table.set_(slot, a, b, [part.scaling for part in parts])
        return linear(x, weight, table, inputs.routing, impl).split(widths, dim=1)

    def check(self, y: Tensor, inputs: Inputs) -> None:
        eager = oracles.eager("lora_linear", inputs)
        assert_right(y, eager, oracles.truth("lora_linear", inputs))

    def test_K28_columns(self, shards: int, rank: int, impl: str, device: torch.device) -> None:
        inputs = self.inputs(rank, device)
        parts = []
        for n in range(shards):
            weight = torch.cat([w.chunk(shards)[n] for w in inputs.weight.split(self.SLICES)])
            shard = partial(lambda n, a, b: (a, b.chunk(shards)[n]), n)
            parts.append(self.layer(inputs.x, weight, inputs, shard, impl))
        self.check(torch.cat([part[s] for s in range(2) for part in parts], dim=1), inputs)

    def test_K28_rows(self, shards: int, rank: int, impl: str, device: torch.device) -> None:
        inputs = self.inputs(rank, device)
        total = torch.zeros_like(inputs.y)
        for n in range(shards):
            x, weight = inputs.x.chunk(shards, 1)[n], inputs.weight.chunk(shards, 1)[n]
            shard = partial(lambda n, a, b: (a.chunk(shards, 1)[n], b), n)
            total += torch.cat(self.layer(x, weight, inputs, shard, impl), dim=1)
        self.check(total, inputs)


@pytest.mark.parametrize("impl", LINEAR)
class TestK30Nothing:
    def test_K30_empty_pool(self, impl: str, device: torch.device) -> None:
        x, weight = torch.randn(3, 16, device=device), torch.randn(8, 16, device=device)
        nothing = torch.zeros(0, 4, 16, device=device), torch.zeros(0, 8, 4, device=device)
        routing = lp.Routing.from_indices([-1] * 3, num_adapters=0, device=device)
        y = linear(
            x.half(),
            weight.half(),
            lp.AdapterTable.from_pools(*(t.half() for t in nothing)),
            routing,
            impl,
        )
        assert torch.equal(y, F.linear(x.half(), weight.half()))

    def test_K30_capacity_0(self, impl: str, device: torch.device) -> None:
        x, weight = torch.randn(3, 16, device=device), torch.randn(8, 16, device=device)
        table = lp.AdapterTable.allocate(
            2, 16, (8,), max_rank=0, dtype=torch.float16, device=device
        )
        routing = lp.Routing.from_indices([0, -1, 1], num_adapters=2, device=device)
        y = linear(x.half(), weight.half(), table, routing, impl)
        assert torch.equal(y, F.linear(x.half(), weight.half()))
