"""Wrong arguments: an error names the argument, the rule and the value, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import loraplex as lp

M, K, N, L, R = 4, 16, 24, 3, 8
MULTI = "multi_lora"
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Bad:
    """One wrong argument: what replaces it, the error, and words that its message has."""

    op: str
    argument: str
    what: str
    change: Callable[[Arguments], object]
    error: type[Exception]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.op}-{self.argument}-{self.what}"


CALLS: Mapping[str, Callable[..., torch.Tensor]] = {
    "lora_linear": lp.lora_linear,
    "add_lora": lp.add_lora_,
    "multi_lora": lp.multi_lora,
    "matmul": lp.matmul,
    "fused_matmul_expand": lp.fused_matmul_expand,
}


def good(op: str, device: torch.device) -> dict[str, Any]:
    """Arguments that work."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    x, indices = draw(M, K), torch.tensor([2, 0, -1, 2], device=device)
    if op in ("matmul", "fused_matmul_expand"):
        product = {"x": x, "c": draw(K, N)}
        return product | ({"y": draw(M, R), "b": draw(R, N)} if op != "matmul" else {})
    pools = {"a_pool": draw(L, R, K), "b_pool": draw(L, N, R)}
    if op == "multi_lora":
        return {
            "x": x, **pools, "indices": indices, "scaling": torch.ones(L),
            "ranks": torch.tensor([8, 8, 5]), "slices": (16, 8),
        } | {"a_pool": draw(L, 2 * R, K)}  # fmt: skip
    table = lp.AdapterTable.from_pools(**pools)
    routing = lp.Routing.from_indices(indices, num_adapters=L)
    call = {"x": x, "table": table, "routing": routing, "bias": draw(N), "impl": "auto"}
    return call | ({"weight": draw(N, K)} if op == "lora_linear" else {"y": draw(M, N)})


def table_of(a: Arguments, dtype: torch.dtype = torch.float32, k: int = K) -> lp.AdapterTable:
    device = a["x"].device
    return lp.AdapterTable.from_pools(
        torch.zeros(L, R, k, dtype=dtype, device=device),
        torch.zeros(L, N, R, dtype=dtype, device=device),
    )


def routing_of(a: Arguments, tokens: int = M, slots: int = L) -> lp.Routing:
    return lp.Routing.from_indices([-1] * tokens, num_adapters=slots, device=a["x"].device)


def tensor_rows(op: str, argument: str, shape: str, like: str | None) -> list[Bad]:
    """What can be wrong with any tensor: its type, number of axes, size, dtype and device."""
    rows = [
        Bad(op, argument, "list", lambda a: [1.0], TypeError, (argument, "torch.Tensor", "list")),
        Bad(op, argument, "none", lambda a: None, TypeError, (argument, "NoneType")),
        Bad(
            op, argument, "axes", lambda a: a[argument][None], ValueError,
            (argument, "shape", shape, "(1, "),
        ),
        Bad(
            op, argument, "dtype", lambda a: a[argument].long(), TypeError,
            (argument, "dtype", "int64"),
        ),
        Bad(
            op, argument, "sparse", lambda a: a[argument].to_sparse(), TypeError,
            (argument, "layout torch.strided", "torch.sparse_coo"),
        ),
    ]  # fmt: skip
    if like:
        rows += [
            Bad(
                op, argument, "other_dtype", lambda a: a[argument].half(), TypeError,
                (argument, "float32", "float16"),
            ),
            Bad(
                op, argument, "device", lambda a: a[argument].to("meta"), ValueError,
                (argument, "device", "meta"),
            ),
        ]  # fmt: skip
    return rows


ROUTED_ROWS = [
    row
    for op in ("lora_linear", "add_lora")
    for row in (
        *tensor_rows(op, "x", f"[M, {K}]", "table"),
        Bad(op, "x", "features", lambda a: a["x"][:, 1:], ValueError, ("x", f"[M, {K}]", "15)")),
        Bad(op, "table", "type", lambda a: a["x"], TypeError, ("table", "AdapterTable", "Tensor")),
        Bad(op, "routing", "type", lambda a: [0] * M, TypeError, ("routing", "Routing", "list")),
        Bad(
            op, "routing", "K11_rows", lambda a: routing_of(a, 830), ValueError,
            ("routing", "one index per row of x (4)", "830"),
        ),
        Bad(
            op, "routing", "slots", lambda a: routing_of(a, slots=9), ValueError,
            ("routing.num_adapters", "at most", "3", "9"),
        ),
        Bad(
            op, "table", "K26_dtype", lambda a: table_of(a, torch.bfloat16), TypeError,
            ("x", "bfloat16", "float32"),
        ),
        Bad(op, "table", "features", lambda a: table_of(a, k=K + 1), ValueError, ("x", "[M, 17]")),
        Bad(
            op, "bias", "shape", lambda a: a["bias"][1:], ValueError,
            ("bias", f"[{N}]", "(23,)"),
        ),
        Bad(op, "bias", "type", lambda a: 0.0, TypeError, ("bias", "torch.Tensor", "float")),
        Bad(op, "bias", "dtype", lambda a: a["bias"].half(), TypeError, ("bias", "float16")),
        Bad(
            op, "bias", "stride", lambda a: a["bias"].repeat_interleave(2)[::2], ValueError,
            ("bias", "contiguous", "(2,)"),
        ),
    )
]  # fmt: skip

IMPL_ROWS = [
    row
    for op in CALLS
    for row in (
        Bad(op, "impl", "unknown", lambda a: "fast", ValueError, ("impl", "auto, torch", "'fast'")),
        Bad(op, "impl", "none", lambda a: None, TypeError, ("impl", "auto, torch", "None")),
        # torch's dispatcher would take these bytes for the name
        Bad(op, "impl", "bytes", lambda a: b"auto", TypeError, ("impl", "auto, torch", "b'auto'")),
    )
]  # fmt: skip

ROWS = [
    *ROUTED_ROWS,
    *IMPL_ROWS,
    *tensor_rows("lora_linear", "weight", f"[{N}, {K}]", "x"),
    Bad(
        "lora_linear", "weight", "transposed", lambda a: a["weight"].T, ValueError,
        ("weight", f"[{N}, {K}]", f"({K}, {N})"),
    ),
    *tensor_rows("add_lora", "y", f"[{M}, {N}]", "x"),
    Bad("add_lora", "y", "rows", lambda a: a["y"][1:], ValueError, ("y", f"[{M}, {N}]", "(3, 24)")),
    Bad(
        "add_lora", "y", "overlap", lambda a: a["y"][:1].expand(M, N), ValueError,
        ("y", "overlap", "(0, 1)"),
    ),
    Bad(
        "add_lora", "y", "overlap_rows", lambda a: a["y"].as_strided((M, N), (5, 1)),
        ValueError, ("y", "overlap", "(5, 1)"),
    ),
    Bad(
        "add_lora", "y", "negated", lambda a: torch.complex(a["y"], a["y"]).conj().imag,
        ValueError, ("y", "hold its values in memory", "y.resolve_neg()"),
    ),
    Bad(
        "add_lora", "x", "shares_memory", lambda a: a["y"].flatten()[: M * K].view(M, K),
        ValueError, ("y", "share memory", "x"),
    ),
    Bad(
        "add_lora", "bias", "shares_memory", lambda a: a["y"].flatten()[:N], ValueError,
        ("y", "share memory", "bias"),
    ),
    *tensor_rows(MULTI, "x", f"[M, {K}]", "a_pool"),
    *tensor_rows(MULTI, "a_pool", "[L, S*R_max, K]", None),
    *tensor_rows(MULTI, "b_pool", "N, R_max]", "a_pool"),
    Bad(
        MULTI, "a_pool", "ranks", lambda a: a["a_pool"][:, 1:], ValueError,
        ("a_pool", "[3, 16, K]", "(3, 15, 16)"),
    ),
    Bad(MULTI, "b_pool", "slots", lambda a: a["b_pool"][1:], ValueError, ("b_pool", "[3, ")),
    Bad(MULTI, "indices", "float", lambda a: torch.zeros(M), TypeError, ("indices", "int32")),
    Bad(MULTI, "indices", "list", lambda a: [0.5] * M, TypeError, ("indices", "0.5")),
    Bad(MULTI, "indices", "type", lambda a: 3, TypeError, ("indices", "3")),
    Bad(MULTI, "indices", "axes", lambda a: a["indices"][None], ValueError, ("indices", "[M]")),
    Bad(MULTI, "indices", "sparse", lambda a: a["indices"].to_sparse(), TypeError, ("indices",)),
    # with one such tensor torch would give a result without values
    Bad(MULTI, "indices", "device", lambda a: a["indices"].to("meta"), ValueError, ("indices",)),
    Bad(MULTI, "scaling", "device", lambda a: a["scaling"].to("meta"), ValueError, ("scaling",)),
    Bad(MULTI, "ranks", "device", lambda a: a["ranks"].to("meta"), ValueError, ("ranks", "meta")),
    Bad(MULTI, "ranks", "huge", lambda a: [2**70] * L, ValueError, ("ranks", "int64", "1180591")),
    Bad(MULTI, "indices", "K11_rows", lambda a: [0] * 830, ValueError, ("routing", "830")),
    Bad(MULTI, "indices", "high", lambda a: [0, 1, 2, 3], ValueError, ("indices", "= 2", "3")),
    Bad(MULTI, "indices", "low", lambda a: [0, 1, 2, -2], ValueError, ("indices", "-1", "-2")),
    Bad(MULTI, "scaling", "shape", lambda a: [1.0], ValueError, ("scaling", "[3]", "(1,)")),
    Bad(MULTI, "scaling", "dtype", lambda a: [1, 2, 3], TypeError, ("scaling", "float32")),
    Bad(MULTI, "scaling", "type", lambda a: "1", TypeError, ("scaling", "'1'")),
    Bad(MULTI, "ranks", "high", lambda a: [8, 9, 8], ValueError, ("ranks[1]", "0 and 8", "9")),
    Bad(MULTI, "ranks", "low", lambda a: [8, 8, -1], ValueError, ("ranks[2]", "0 and 8", "-1")),
    Bad(MULTI, "ranks", "float", lambda a: [8.0] * 3, TypeError, ("ranks", "int64", "float32")),
    Bad(MULTI, "ranks", "shape", lambda a: [8], ValueError, ("ranks", "[3]", "(1,)")),
    Bad(MULTI, "ranks", "type", lambda a: object(), TypeError, ("ranks", "object")),
    Bad(MULTI, "slices", "sum", lambda a: (16, 9), ValueError, ("slices", "N = 24", "(16, 9)")),
    Bad(MULTI, "slices", "zero", lambda a: (24, 0), ValueError, ("slices[1]", ">= 1", "0")),
    Bad(MULTI, "slices", "float", lambda a: (24.0,), TypeError, ("slices[0]", "int", "24.0")),
    Bad(MULTI, "slices", "type", lambda a: 24, TypeError, ("slices", "24")),
    Bad(MULTI, "slices", "empty", lambda a: (), ValueError, ("slices", "N = 24", "()")),
    *[
        row
        for op in ("matmul", "fused_matmul_expand")
        for row in (*tensor_rows(op, "x", "[M, K]", None), *tensor_rows(op, "c", "[16, N]", "x"))
    ],
    *tensor_rows("fused_matmul_expand", "y", f"[{M}, R]", "x"),
    *tensor_rows("fused_matmul_expand", "b", f"[{R}, {N}]", "x"),
    Bad("matmul", "c", "rows", lambda a: a["c"][1:], ValueError, ("c", "[16, N]", "(15, 24)")),
]  # fmt: skip


def memory_of(arguments: Arguments) -> list[torch.Tensor]:
    """Every tensor that an op could write."""
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    table, routing = arguments.get("table"), arguments.get("routing")
    if isinstance(table, lp.AdapterTable):
        tensors += [table.entries, *table.storages]
    if isinstance(routing, lp.Routing):
        tensors += [routing.indices, routing.places]
    return tensors


@pytest.mark.parametrize("bad", ROWS, ids=str)
def test_bad_argument(bad: Bad, device: torch.device) -> None:
    arguments = good(bad.op, device)
    CALLS[bad.op](**arguments)
    memory = memory_of(arguments)
    before = [tensor.clone() for tensor in memory]
    wrong = arguments | {bad.argument: bad.change(arguments)}
    with pytest.raises(bad.error) as caught:
        CALLS[bad.op](**wrong)
    missing = [word for word in bad.words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {str(caught.value)!r}"
    for tensor, copy in zip(memory, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def test_y_and_x_may_be_columns_of_one_buffer(device: torch.device) -> None:
    """Interleaved memory is not shared memory."""
    arguments = good("add_lora", device)
    buffer = torch.zeros(M, K + N, device=device)
    x, y = buffer[:, :K], buffer[:, K:]
    x.copy_(arguments["x"])
    y.copy_(arguments["y"])
    expected = lp.add_lora_(**arguments)
    torch.testing.assert_close(lp.add_lora_(**(arguments | {"x": x, "y": y})), expected)


@pytest.mark.interpreter
class TestWhatCannotRunHere:
    """A named implementation raises; ``auto`` finds another, and says which."""

    def test_K24_bfloat16_dots_are_wrong_in_the_interpreter(self) -> None:
        x = torch.ones(2, 16, dtype=torch.bfloat16)
        with pytest.raises(lp.UnsupportedImplError, match=r"impl='tiles'.*bfloat16"):
            lp.matmul(x, x.T, impl="tiles")
        with pytest.raises(lp.UnsupportedImplError, match=r"impl='triton'.*bfloat16"):
            lp.matmul(x, x.T, impl="triton")
        assert torch.equal(lp.matmul(x, x.T), x @ x.T)

    def test_host_tensors_without_the_interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("loraplex.env.is_interpreting", lambda: False)
        x = torch.ones(2, 16)
        with pytest.raises(lp.UnsupportedImplError, match=r"impl='triton'.*TRITON_INTERPRET=1"):
            lp.matmul(x, x.T, impl="triton")
        assert "torch" in lp.explain("matmul", m=2, k=16, slices=[2]).choice.impl

    def test_no_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("loraplex.env.has_triton", lambda: False)
        x = torch.ones(2, 16)
        with pytest.raises(lp.UnsupportedImplError, match="not installed"):
            lp.matmul(x, x.T, impl="triton")
        assert torch.equal(lp.matmul(x, x.T), x @ x.T)
