"""Adapter tables: what each entry says, in-place changes, what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import struct
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import loraplex as lp
from loraplex.reference.unpack import unpack_slot
from loraplex.table import A_PTR, BIAS_PTR, COLUMN_SCALE_PTR, ENTRY_FIELDS, RANK, SCALING
from loraplex.testing import lay_out

L, K, R = 3, 16, 8
SLICES = (24, 8)
N = sum(SLICES)


def pools(device: torch.device, layout: str = "dense") -> tuple[Tensor, Tensor]:
    a = torch.randn(L, len(SLICES) * R, K, device=device)
    return lay_out(a, layout), lay_out(torch.randn(L, N, R, device=device), layout)


def negated(*shape: int) -> Tensor:
    """A view whose memory holds what it is not: torch negates it whenever it reads it."""
    view = torch.ones(shape, dtype=torch.complex64).conj().imag
    assert view.is_neg()
    return view


def empty_table(device: torch.device, **changes: Any) -> lp.AdapterTable:
    options: dict[str, Any] = {
        "max_rank": 16, "dtype": torch.float32, "device": device, "rank_multiple": 1,
        "has_column_scale": True, "has_bias": True,
    }  # fmt: skip
    return lp.AdapterTable.allocate(L, K, SLICES, **(options | changes))


def parts_of(table: lp.AdapterTable, slot: int) -> list[Any]:
    strides = (table.a_inner_stride, table.b_inner_stride)
    return unpack_slot(
        table.entries[slot].tolist(), table.storages, K, table.slices, table.dtype, strides
    )


@pytest.mark.parametrize("layout", ["dense", "wide", "odd", "stepped", "transposed"])
def test_entries_point_into_the_pools(layout: str, device: torch.device) -> None:
    a, b = pools(device, layout)
    scaling, ranks = torch.tensor([1.0, 0.5, 2.0]), [8, 5, 0]
    column_scale, bias = torch.randn(L, N, device=device), torch.randn(L, N, device=device)
    table = lp.AdapterTable.from_pools(a, b, SLICES, scaling, ranks, column_scale, bias)
    assert table.entries.shape == (L, len(SLICES), ENTRY_FIELDS)
    for slot in range(L):
        start = 0
        for s, (part, width) in enumerate(zip(parts_of(table, slot), SLICES, strict=True)):
            rank = ranks[slot]
            assert torch.equal(part.a, a[slot, s * R : s * R + rank])
            assert torch.equal(part.b, b[slot, start : start + width, :rank])
            assert part.scaling == scaling[slot]
            assert torch.equal(part.column_scale, column_scale[slot, start : start + width])
            assert torch.equal(part.bias, bias[slot, start : start + width])
            start += width


def test_entries_see_later_changes_of_the_pools(device: torch.device) -> None:
    a, b = pools(device)
    table = lp.AdapterTable.from_pools(a, b, SLICES)
    a[1].fill_(7)
    assert (parts_of(table, 1)[0].a == 7).all()


def test_scaling_and_ranks_are_copies(device: torch.device) -> None:
    a, b = pools(device)
    scaling, ranks = torch.ones(L, device=device), torch.full((L,), 8, device=device)
    table = lp.AdapterTable.from_pools(a, b, SLICES, scaling, ranks)
    before = table.entries.clone()
    scaling.zero_()
    ranks.zero_()
    assert torch.equal(table.entries, before)


@pytest.mark.parametrize(
    ("a", "ranks", "expected"),
    [
        (lambda a: a, None, 8),
        (lambda a: a, [8, 0, 8], 8),
        (lambda a: a, [8, 5, 8], 1),
        (lambda a: lay_out(a, "odd"), None, 1),
        (lambda a: lay_out(a, "stepped"), None, 1),
        (lambda a: lay_out(a, "wide"), None, 8),
    ],
    ids=["plain", "rank_0", "rank_5", "odd", "stepped", "wide"],
)
def test_rank_multiple_is_found(
    a: Callable[[Tensor], Tensor], ranks: list[int] | None, expected: int, device: torch.device
) -> None:
    a_pool, b_pool = pools(device)
    table = lp.AdapterTable.from_pools(a(a_pool), b_pool, SLICES, ranks=ranks)
    assert table.rank_multiple == expected
    asked = lp.AdapterTable.from_pools(a(a_pool), b_pool, SLICES, ranks=ranks, rank_multiple=1)
    assert asked.rank_multiple == 1
    if expected == 1:
        with pytest.raises(ValueError, match="rank_multiple must be 1 unless"):
            lp.AdapterTable.from_pools(a(a_pool), b_pool, SLICES, ranks=ranks, rank_multiple=8)


def test_K18_one_slot_with_an_odd_stride(device: torch.device) -> None:
    """The stride of an axis of size 1 says nothing."""
    a = torch.randn(7 * R * K, device=device).as_strided((1, R, K), (13, K, 1))
    b = torch.randn(24 * R, device=device).as_strided((1, 24, R), (0, R, 1))
    table = lp.AdapterTable.from_pools(a, b)
    assert table.rank_multiple == 8
    assert torch.equal(parts_of(table, 0)[0].a, a[0])


def test_set_and_clear(device: torch.device) -> None:
    table = empty_table(device)
    a = [torch.randn(5, K, device=device), None]
    b = [torch.randn(24, 5, device=device), None]
    scale = [torch.randn(24, device=device), torch.randn(8, device=device)]
    table.set_(1, a, b, [2.0, 3.0], scale, [None, torch.ones(8, device=device)])
    first, second = parts_of(table, 1)
    assert torch.equal(first.a, a[0])
    assert torch.equal(first.b, b[0])
    assert (first.scaling, second.scaling) == (2.0, 3.0)
    assert torch.equal(first.column_scale, scale[0])
    assert first.bias is None
    assert second.a.shape == (0, K)
    assert torch.equal(second.column_scale, scale[1])
    assert torch.equal(second.bias, torch.ones(8, device=device))
    assert not table.entries[[0, 2]].any()
    table.clear_(1)
    assert not table.entries.any()


def test_entries_are_changed_in_place(device: torch.device) -> None:
    table = empty_table(device)
    address = table.entries.data_ptr()
    table.set_(
        0, [torch.zeros(8, K, device=device), None], [torch.zeros(24, 8, device=device), None]
    )
    table.clear_(0)
    assert table.entries.data_ptr() == address


def test_tensors_live_as_long_as_their_entry(device: torch.device) -> None:
    table = empty_table(device)

    def fill(slot: int) -> list[weakref.ref[Tensor]]:
        a, b = torch.zeros(8, K, device=device), torch.zeros(24, 8, device=device)
        table.set_(slot, [a, None], [b, None])
        return [weakref.ref(a), weakref.ref(b)]

    replaced, cleared, kept = fill(0), fill(1), fill(2)
    fill(0)
    table.clear_(1)
    gc.collect()
    assert [r() is None for r in (*replaced, *cleared, *kept)] == [True] * 4 + [False] * 2


def test_entries_may_be_a_view_of_a_pool_s_own_memory(device: torch.device) -> None:
    """Slot-major metadata of all layers: one copy updates an adapter everywhere."""
    metadata = torch.full((L, 4, len(SLICES), ENTRY_FIELDS), 9, device=device)
    arena = torch.randn(8 * (K + N), device=device)
    table = empty_table(device, entries=metadata[:, 2], storages=[arena])
    assert not metadata[:, 2].any()
    assert (metadata[:, [0, 1, 3]] == 9).all()
    a, b = arena[: 8 * K].view(8, K), arena[8 * K :][: 8 * 24].view(24, 8)
    record = lp.AdapterTable.pack_entry(a, b, 0.5)
    metadata[1, 2, 0] = torch.tensor(record, device=device)
    part = parts_of(table, 1)[0]
    assert torch.equal(part.a, a)
    assert torch.equal(part.b, b)
    assert part.scaling == 0.5


def test_pack_entry() -> None:
    a, b, vector = torch.zeros(3, K), torch.zeros(24, 3), torch.zeros(24)
    record = lp.AdapterTable.pack_entry(a, b, -0.75, vector)
    assert record[:RANK] == [a.data_ptr(), K, b.data_ptr(), 3]
    assert record[RANK] == 3
    assert struct.unpack("<f", struct.pack("<I", record[SCALING]))[0] == -0.75
    assert record[COLUMN_SCALE_PTR] == vector.data_ptr()
    assert record[BIAS_PTR] == 0
    assert lp.AdapterTable.pack_entry(a[:0], b[:, :0], 1.0)[: RANK + 1] == [0] * 5


def test_entries_outside_of_the_storages_are_not_read(device: torch.device) -> None:
    table = lp.AdapterTable.from_pools(*pools(device), SLICES)
    table.entries[0, 0, A_PTR] += 10**9
    routing = lp.Routing.from_indices([0], num_adapters=L, device=device)
    x, weight = torch.randn(1, K, device=device), torch.randn(N, K, device=device)
    with pytest.raises(ValueError, match="must point into the tensors"):
        lp.lora_linear(x, weight, table, routing, impl="torch")


SET_GOOD: dict[str, Any] = {
    "slot": 1, "a": [torch.zeros(8, K), None], "b": [torch.zeros(24, 8), None], "scaling": 1.0,
    "column_scale": None, "bias": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"slot": 3}, ValueError, "slot must be between 0 and 2, got 3"),
        ({"slot": -1}, ValueError, "slot must be between 0 and 2, got -1"),
        ({"slot": 1.0}, TypeError, "slot must be an int, got 1.0"),
        ({"a": [torch.zeros(8, K)]}, ValueError, r"a must have one element per slice \(2\), got 1"),
        ({"a": torch.zeros(8, K)}, TypeError, "a must be a sequence .* got Tensor"),
        ({"a": [None, None]}, ValueError, r"a\[0\] and b\[0\] must both be given"),
        ({"a": [1.0, None]}, TypeError, r"a\[0\] must be a torch.Tensor, got float"),
        (
            {"a": [torch.zeros(8, K + 1), None]},
            ValueError,
            r"a\[0\] .* \[rank, 16\], got \(8, 17\)",
        ),
        ({"a": [torch.zeros(8, K).half(), None]}, TypeError, r"a\[0\] .* float32, got float16"),
        ({"a": [torch.zeros(8, K, device="meta"), None]}, ValueError, r"a\[0\] .* got meta"),
        ({"a": [torch.zeros(K, 8).T, None]}, ValueError, r"a\[0\] must be dense in its last axis"),
        ({"b": [torch.zeros(24, 7), None]}, ValueError, r"b\[0\] .* \[24, 8\], got \(24, 7\)"),
        ({"b": [torch.zeros(8, 24).T, None]}, ValueError, r"b\[0\] must be dense in its last axis"),
        (
            {"a": [torch.zeros(17, K), None], "b": [torch.zeros(24, 17), None]},
            ValueError,
            r"rank of a\[0\] must be between 0 and 16, got 17",
        ),
        ({"scaling": [1.0]}, ValueError, r"scaling must have one element per slice \(2\), got 1"),
        ({"scaling": ["1", 1.0]}, TypeError, r"scaling\[0\] must be a number, got '1'"),
        ({"scaling": None}, TypeError, r"scaling\[0\] must be a number, got None"),
        ({"scaling": float("nan")}, ValueError, r"scaling\[0\] must be finite in float32, got nan"),
        ({"scaling": 1e40}, ValueError, r"scaling\[0\] must be finite in float32, got 1e\+40"),
        ({"column_scale": [torch.ones(23), None]}, ValueError, r"column_scale\[0\] .* \[24\]"),
        (
            {"column_scale": [torch.ones(24).half(), None]},
            TypeError,
            r"column_scale\[0\] .* float32",
        ),
        ({"bias": [torch.ones(48)[::2], None]}, ValueError, r"bias\[0\] must be contiguous"),
        ({"bias": torch.ones(24)}, TypeError, "bias must be a sequence"),
        ({"a": [negated(8, K), None]}, ValueError, r"a\[0\] must hold its values in memory"),
        ({"bias": [negated(24), None]}, ValueError, r"bias\[0\] must hold its values in memory"),
    ],
)
def test_bad_adapter_changes_nothing(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    table = empty_table(torch.device("cpu"))
    table.set_(**SET_GOOD)
    before, held = table.entries.clone(), list(table.storages)
    with pytest.raises(error, match=words):
        table.set_(**(SET_GOOD | change))
    assert torch.equal(table.entries, before)
    assert [id(t) for t in table.storages] == [id(t) for t in held]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(5, K), torch.zeros(24, 5)),
        (lay_out(torch.zeros(8, K), "odd"), torch.zeros(24, 8)),
        (torch.zeros(8, K), lay_out(torch.zeros(24, 8), "odd")),
    ],
    ids=["rank_5", "odd_a", "odd_b"],
)
def test_rank_multiple_8_is_a_promise(a: Tensor, b: Tensor) -> None:
    table = empty_table(torch.device("cpu"), rank_multiple=8)
    with pytest.raises(ValueError, match="multiple of rank_multiple = 8 .* rank_multiple=1 allows"):
        table.set_(0, [a, None], [b, None])
    empty_table(torch.device("cpu")).set_(0, [a, None], [b, None])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"dtype": torch.int8}, TypeError, "dtype must be a floating dtype .* got torch.int8"),
        ({"rank_multiple": 4}, ValueError, "rank_multiple must be 1 or 8, got 4"),
        ({"max_rank": -1}, ValueError, "max_rank must be >= 0, got -1"),
        ({"slices": (24, 0)}, ValueError, r"slices\[1\] must be >= 1, got 0"),
        ({"slices": ()}, ValueError, r"slices must have at least one width, got \(\)"),
        ({"slices": 24}, TypeError, "slices must be a sequence of ints, got 24"),
        ({"in_features": 0}, ValueError, "in_features must be >= 1, got 0"),
        ({"device": "nowhere"}, ValueError, "device must be usable here, got 'nowhere'"),
        ({"device": None}, TypeError, "device must be a torch.device or its name, got None"),
        ({"storages": [None]}, TypeError, r"storages\[0\] must be a torch.Tensor, got NoneType"),
        ({"storages": 1}, TypeError, "storages must be a sequence of tensors, got int"),
        ({"entries": [1]}, TypeError, "entries must be a torch.Tensor, got list"),
        ({"num_adapters": 2.5}, TypeError, "num_adapters must be an int, got 2.5"),
        (
            {"entries": torch.zeros(L, 2, 8)},
            TypeError,
            "entries must have dtype int64, got float32",
        ),
        (
            {"entries": torch.zeros(L, 1, 8, dtype=torch.int64)},
            ValueError,
            r"entries must have shape \[3, 2, 8\], got \(3, 1, 8\)",
        ),
        (
            {"entries": torch.zeros(L, 8, 2, dtype=torch.int64).mT},
            ValueError,
            "entries must be dense in its last two axes",
        ),
        (
            {"entries": torch.zeros(L, 2, 8, dtype=torch.int64, device="meta")},
            ValueError,
            r"entries must be on the device of the table \(cpu\), got meta",
        ),
    ],
)
def test_bad_allocation(change: dict[str, Any], error: type[Exception], words: str) -> None:
    good = {
        "num_adapters": L, "in_features": K, "slices": SLICES, "max_rank": 8,
        "dtype": torch.float32, "device": "cpu",
    }  # fmt: skip
    with pytest.raises(error, match=words):
        lp.AdapterTable.allocate(**(good | change))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"column_scale": torch.ones(L, N + 1)}, ValueError, r"column_scale .* \[3, 32\]"),
        (
            {"column_scale": torch.ones(L, N).half()},
            TypeError,
            "column_scale .* float32, got float16",
        ),
        ({"column_scale": torch.ones(N, L).T}, ValueError, "column_scale must be dense"),
        (
            {"bias": torch.ones(L, N, device="meta")},
            ValueError,
            "bias must be on the device .* meta",
        ),
        ({"bias": [1.0]}, TypeError, "bias must be a torch.Tensor, got list"),
        ({"ranks": [True, 8, 8]}, TypeError, r"ranks must be .* numbers, got \[True, 8, 8\]"),
        ({"ranks": [2**70] * L}, ValueError, r"ranks must fit int64, got \[1180591620717411303424"),
        ({"scaling": [True, 1.0, 1.0]}, TypeError, "scaling must be .* numbers, got"),
        ({"scaling": torch.ones(L).to_sparse()}, TypeError, "scaling must have layout"),
        ({"a_pool": torch.zeros(L, 16, K).to_sparse()}, TypeError, "a_pool must have layout"),
        ({"a_pool": negated(L, 16, K)}, ValueError, r"a_pool must hold .*a_pool.resolve_neg\(\)"),
        ({"b_pool": negated(L, N, 8)}, ValueError, "b_pool must hold its values"),
        ({"bias": negated(L, N)}, ValueError, "bias must hold its values"),
        ({"rank_multiple": 8.0}, TypeError, "rank_multiple must be an int, got 8.0"),
        ({"rank_multiple": 3}, ValueError, "rank_multiple must be 1 or 8, got 3"),
        ({"a_pool": torch.zeros(L, 16, K).long()}, TypeError, "a_pool must have dtype float32"),
    ],
)
def test_bad_pools(change: dict[str, Any], error: type[Exception], words: str) -> None:
    a, b = pools(torch.device("cpu"))
    with pytest.raises(error, match=words):
        lp.AdapterTable.from_pools(**({"a_pool": a, "b_pool": b, "slices": SLICES} | change))


def test_no_slots_and_no_numbers(device: torch.device) -> None:
    a, b = (pool[:0] for pool in pools(device))
    assert lp.AdapterTable.from_pools(a, b, SLICES, scaling=[], ranks=[]).num_adapters == 0


@pytest.mark.gpu
def test_ranks_on_the_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pools(device)
    ranks = torch.tensor([8, 99, -3], device=device)
    table = lp.AdapterTable.from_pools(a, b, SLICES, ranks=ranks, rank_multiple=1)
    assert table.entries[:, 0, RANK].tolist() == [8, 8, 0]
    monkeypatch.setenv("LORAPLEX_DEBUG", "1")
    with pytest.raises(ValueError, match=r"ranks\[1\] must be between 0 and 8, got 99"):
        lp.AdapterTable.from_pools(a, b, SLICES, ranks=ranks, rank_multiple=1)


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_table_is_not_copied(copying: Callable[[object], object]) -> None:
    """The copy's tensors would lie elsewhere, and its addresses point at the ones it came from."""
    with pytest.raises(TypeError, match="AdapterTable cannot be copied or pickled"):
        copying(empty_table(torch.device("cpu")))


def test_repr_says_what_it_is() -> None:
    table = empty_table(torch.device("cpu"))
    assert repr(table) == (
        "AdapterTable(num_adapters=3, in_features=16, slices=(24, 8), max_rank=16, dtype=float32, "
        "device='cpu')"
    )
