"""Routing: the host's plan by its own words, the kernel against the host, updates in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import loraplex as lp
from loraplex.reference.routing import PLAN_HEADER, build_routing, item_height, plan_width
from loraplex.routing import MAX_TILE_M, tile_height

ROWS = st.lists(st.integers(-1, 6), max_size=300)


@pytest.mark.parametrize(
    ("tokens", "height"),
    [(0, 16), (1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (128, 128), (129, 128)],
)
def test_tile_height(tokens: int, height: int) -> None:
    assert tile_height(tokens) == height


def buffers(rows: Sequence[int], tile_m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, places and plan, full of what nobody may read."""
    tiles = -(-len(rows) // tile_m)
    return (
        torch.full((len(rows),), 99, dtype=torch.int32),
        torch.full((len(rows),), 99, dtype=torch.int32),
        torch.full((tiles, plan_width(tile_m)), 99, dtype=torch.int32),
    )


def items_of(plan: Tensor, tile_m: int) -> list[tuple[int, list[int]]]:
    """Slot and rows of each item of one tile."""
    words = plan.tolist()
    order, packed, owners = (words[PLAN_HEADER + n * tile_m :][:tile_m] for n in (1, 2, 3))
    return [
        (slot, order[item >> 8 :][: item & 0xFF])
        for item, slot in zip(packed[: words[1]], owners, strict=False)
    ]


@given(ROWS)
def test_plan_names_every_row_once(rows: list[int]) -> None:
    tile_m = tile_height(len(rows))
    indices, places, plan = buffers(rows, tile_m)
    build_routing(torch.tensor(rows, dtype=torch.int64), indices, places, plan)
    assert indices.tolist() == rows
    for tile in range(plan.shape[0]):
        first = tile * tile_m
        own = rows[first : first + tile_m]
        slots = plan[tile, PLAN_HEADER:][: plan[tile, 0]].tolist()
        assert slots == list(dict.fromkeys(row for row in own if row >= 0))
        items = items_of(plan[tile], tile_m)
        assert sorted(row for _, part in items for row in part) == [
            first + offset for offset in range(len(own))
        ]
        # adapters in the order of their places, base rows last
        order = {slot: place for place, slot in enumerate([*slots, -1])}
        assert [order[slot] for slot, _ in items] == sorted(order[slot] for slot, _ in items)
        for slot, part in items:
            assert 0 < len(part) <= item_height(tile_m)
            assert {rows[row] for row in part} == {slot}
            place = order[slot] if slot >= 0 else -1
            assert {int(places[row]) for row in part} == {place}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "rows",
    [
        [-1] * 5,
        [3],
        [3, 0, -1, 3, 1, 0],
        list(range(16)),
        [row % 7 - 1 for row in range(40)],
        [5] * 100,
        [row * 7 % 131 - 1 for row in range(300)],
    ],
    ids=["all_base", "one", "mixed", "distinct", "40", "identical", "tiles_3"],
)
def test_kernel_gives_what_the_host_gives(
    rows: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    from loraplex.kernels.routing import launch_routing

    tile_m = tile_height(len(rows))
    wanted, found = ([part.to(device) for part in buffers(rows, tile_m)] for _ in range(2))
    host = [part.cpu() for part in wanted]
    build_routing(torch.tensor(rows, dtype=dtype), *host)
    # a stride between the indices
    source = torch.tensor(rows, dtype=dtype, device=device).repeat_interleave(2)[::2]
    launch_routing(source, *found, 200, tile_m=tile_m, item_m=item_height(tile_m))
    assert [part.cpu().tolist() for part in found[:2]] == [part.tolist() for part in host[:2]]
    for plan, expected in zip(found[2].cpu(), host[2], strict=True):
        count, items = expected[:2].tolist()
        assert plan[:2].tolist() == [count, items]
        assert plan[PLAN_HEADER:][:count].tolist() == expected[PLAN_HEADER:][:count].tolist()
        assert items_of(plan, tile_m) == items_of(expected, tile_m)


@pytest.mark.parametrize("bad", [3, 4, -2, -(2**31), 2**31 - 1, 2**31, 2**32, 2**32 + 1, -(2**32)])
def test_kernel_makes_a_wild_index_a_base_row(bad: int, device: torch.device) -> None:
    """Indices on a GPU are not checked; what they name must not become an address.

    2**32 + 1 is 1 after narrowing to 32 bits.
    """
    from loraplex.kernels.routing import launch_routing

    rows = [1, bad, 2]
    parts = [part.to(device) for part in buffers(rows, 16)]
    source = torch.tensor(rows, dtype=torch.int64, device=device)
    launch_routing(source, *parts, 3, tile_m=16, item_m=16)
    assert parts[0].tolist() == [1, -1, 2]
    assert parts[1].tolist() == [0, -1, 1]
    assert parts[2][0, 0] == 2


@pytest.mark.parametrize("kind", ["int64", "int32", "strided", "list", "host"])
def test_K31_any_form_of_the_indices(kind: str, device: torch.device) -> None:
    rows = [3, 0, -1, 3, 1, 0]
    given_as = {
        "int64": torch.tensor(rows, device=device),
        "int32": torch.tensor(rows, dtype=torch.int32, device=device),
        "strided": torch.tensor(rows, device=device).repeat_interleave(3)[1::3],
        "list": rows,
        "host": torch.tensor(rows),
    }[kind]
    routing = lp.Routing.from_indices(given_as, num_adapters=4, device=device)
    assert routing.indices.tolist() == rows
    assert routing.places.tolist() == [0, 1, -1, 0, 2, 1]
    assert routing.slots[0, : routing.counts[0]].tolist() == [3, 0, 1]
    assert routing.indices.device == routing.device == device


def test_update_keeps_every_address(device: torch.device) -> None:
    routing = lp.Routing.allocate(200, num_adapters=4, device=device)

    def addresses() -> list[int]:
        return [t.data_ptr() for t in (routing.indices, routing.places, routing.plan)]

    first = addresses()
    assert routing.indices.tolist() == [-1] * 200
    for rows in ([0] * 200, [1, -1, 2], [], [3] * 130):
        assert routing.update_(rows) is routing
        assert routing.num_tokens == len(rows)
        assert routing.indices.tolist() == rows
        # torch gives an empty view no address
        assert addresses() == first or not rows


@given(ROWS, ROWS)
def test_K10_nothing_stays_of_what_was_before(before: list[int], after: list[int]) -> None:
    """A routing that was used before says what a new one of the same height says."""
    size = max(len(before), len(after), 1)
    used = lp.Routing.allocate(size, num_adapters=7, device="cpu").update_(before).update_(after)
    new = lp.Routing.allocate(size, num_adapters=7, device="cpu").update_(after)
    assert used.indices.tolist() == new.indices.tolist()
    assert used.places.tolist() == new.places.tolist()
    for tile in range(-(-len(after) // used.tile_m)):
        assert used.counts[tile] == new.counts[tile]
        assert used.slots[tile, : used.counts[tile]].tolist() == (
            new.slots[tile, : new.counts[tile]].tolist()
        )
        assert items_of(used.plan[tile], used.tile_m) == items_of(new.plan[tile], new.tile_m)


@pytest.mark.parametrize(
    ("indices", "error", "words"),
    [
        (torch.tensor([0.0]), TypeError, "indices must have dtype int32, int64, got float32"),
        (torch.tensor([True]), TypeError, "indices must have dtype int32, int64, got bool"),
        (torch.tensor([[0]]), ValueError, r"indices must have shape \[M\], got \(1, 1\)"),
        (torch.tensor(0), ValueError, r"indices must have shape \[M\], got \(\)"),
        (torch.tensor([0, 3]), ValueError, "between -1 .* and num_adapters - 1 = 2, got 3"),
        (torch.tensor([0, -2]), ValueError, "got -2"),
        (torch.tensor([0, 2**32]), ValueError, "got 4294967296"),
        ([0, 3], ValueError, "got 3"),
        ([0, 2**70], ValueError, "indices must fit int64, got .*1180591620717411303424"),
        ([0.5], TypeError, "indices must be whole numbers"),
        ([True], TypeError, "indices must be whole numbers"),
        ("01", TypeError, "indices must be whole numbers"),
        (7, TypeError, "indices must be a tensor or a sequence of ints, got 7"),
        (None, TypeError, "indices must be a tensor or a sequence of ints, got None"),
        (torch.tensor([0]).to_sparse(), TypeError, "indices must have layout torch.strided"),
        ([0] * 9, ValueError, "indices must have at most max_tokens = 8 elements, got 9"),
    ],
)
def test_bad_indices_change_nothing(
    indices: object, error: type[Exception], words: str, device: torch.device
) -> None:
    routing = lp.Routing.allocate(8, num_adapters=3, device=device).update_([2, -1])
    before = routing.plan.clone()
    with pytest.raises(error, match=words):
        routing.update_(indices)  # type: ignore[arg-type]
    assert (routing.num_tokens, routing.indices.tolist()) == (2, [2, -1])
    assert torch.equal(routing.plan, before)
    if "max_tokens" not in words:
        with pytest.raises(error, match=words):
            lp.Routing.from_indices(indices, num_adapters=3, device=device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((-1, 3), ValueError, "max_tokens must be between 0 and 2147483647, got -1"),
        ((2**31, 3), ValueError, "max_tokens must be between 0 and 2147483647, got 2147483648"),
        ((1.0, 3), TypeError, "max_tokens must be an int, got 1.0"),
        ((8, -1), ValueError, "num_adapters must be between 0 and 2147483647, got -1"),
        # slots are int32 in the buffers: 2**32 + 1 would be slot 1 there
        ((8, 2**33), ValueError, "num_adapters must be between 0 and .*, got 8589934592"),
        ((8, True), TypeError, "num_adapters must be an int, got True"),
    ],
)
def test_bad_sizes(arguments: tuple[int, int], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        lp.Routing.allocate(arguments[0], num_adapters=arguments[1], device="cpu")


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        ("cuda:99", ValueError, "device must be usable here, got 'cuda:99': ."),
        ("nowhere", ValueError, "device must be usable here, got 'nowhere': ."),
        ("", ValueError, "device must be usable here, got ''"),
        (None, TypeError, "device must be a torch.device or its name, got None"),
        (True, TypeError, "device must be a torch.device or its name, got True"),
    ],
)
def test_bad_devices(device: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        lp.Routing.allocate(4, num_adapters=1, device=device)
    if device is not None:
        with pytest.raises(error, match=words):
            lp.Routing.from_indices([0], num_adapters=1, device=device)


def test_the_meta_device_has_shapes_and_no_values() -> None:
    routing = lp.Routing.from_indices([0, -1], num_adapters=1, device="meta")
    assert (routing.indices.shape, routing.device.type) == ((2,), "meta")


def test_indices_on_another_device() -> None:
    routing = lp.Routing.allocate(8, num_adapters=3, device="cpu")
    with pytest.raises(ValueError, match=r"indices must be .* \(cpu\), got meta"):
        routing.update_(torch.zeros(2, dtype=torch.int64, device="meta"))


def test_many_rows_have_several_tiles() -> None:
    routing = lp.Routing.from_indices([0] * 300, num_adapters=1)
    assert (routing.tile_m, routing.plan.shape[0]) == (MAX_TILE_M, 3)
    assert routing.counts.tolist() == [1, 1, 1]


def test_repr_says_what_it_is() -> None:
    routing = lp.Routing.allocate(20, num_adapters=3, device="cpu").update_([0])
    assert repr(routing) == (
        "Routing(num_tokens=1, max_tokens=20, num_adapters=3, tile_m=32, device='cpu')"
    )


@pytest.mark.gpu
class TestOnTheGpu:
    def test_update_does_not_wait(self, device: torch.device) -> None:
        """P06: one launch, no synchronisation."""
        routing = lp.Routing.allocate(200, num_adapters=4, device=device)
        indices = torch.tensor([row % 5 - 1 for row in range(150)], device=device)
        routing.update_(indices)
        torch.cuda.set_sync_debug_mode("error")
        try:
            routing.update_(indices)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(routing.indices.long(), indices)

    def test_debug_checks_the_range(
        self, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        indices = torch.tensor([0, 3], device=device)
        assert lp.Routing.from_indices(indices, num_adapters=3).indices.tolist() == [0, -1]
        monkeypatch.setenv("LORAPLEX_DEBUG", "1")
        with pytest.raises(ValueError, match="got 3"):
            lp.Routing.from_indices(indices, num_adapters=3)

    def test_graph_sees_new_indices(self, device: torch.device) -> None:
        source = torch.tensor([0, 1, -1, 2], device=device)
        routing = lp.Routing.from_indices(source, num_adapters=3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            routing.update_(source)
        source.copy_(torch.tensor([2, 2, 0, -1]))
        graph.replay()
        assert routing.indices.tolist() == [2, 2, 0, -1]
        assert routing.places.tolist() == [0, 0, 1, -1]
