"""Slots of a step's tokens: the same for every number of rows that the step may be run with."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from loraplex import Routing
from loraplex.engines.vllm.step import Step, slots_of
from loraplex.reference.routing import tile_height_of


@pytest.fixture
def step(device: torch.device) -> Step:
    return Step(300, 5, device)


def work(plan: Tensor) -> list[list[tuple[int, list[int]]]]:
    """Per tile, slot and rows of every item of an adapter; base rows are nobody's work."""
    height = tile_height_of(plan)
    found = []
    for words in plan.tolist():
        rows = words[16 + height : 16 + 2 * height]
        items = zip(words[16 + 2 * height :], words[16 + 3 * height :], strict=False)
        found.append(
            [
                (slot, rows[packed >> 8 : (packed >> 8) + (packed & 0xFF)])
                for packed, slot in list(items)[: words[1]]
                if slot >= 0
            ]
        )
    return found


STEPS = [[3], [2, -1, 0, 2], [-1] * 7, list(range(5)) * 5, [1, -1] * 40, [4] * 300, [0, 1]]


def test_routes_are_those_of_the_padded_step(step: Step, device: torch.device) -> None:
    """Long steps leave nothing behind for shorter ones, and the other way round."""
    for slots in STEPS:
        step.set_(np.array(slots))
        for rows in {len(slots), 16, 32, 64, 128, 300, 384}:
            if rows < len(slots):
                continue
            padded = torch.tensor(slots + [-1] * (rows - len(slots)), device=device)
            want = Routing.from_indices(padded, num_adapters=5)
            route = step.route(rows)
            assert torch.equal(route.indices, want.indices)
            assert torch.equal(route.places, want.places)
            assert route.plan.shape == want.plan.shape
            assert work(route.plan) == work(want.plan)
        assert step.has_lora == any(slot >= 0 for slot in slots)


def test_addresses_stay(step: Step) -> None:
    """A CUDA graph that was captured with a number of rows reads the same memory ever after."""
    before = {rows: [t.data_ptr() for t in step.route(rows)] for rows in (1, 16, 40, 100)}
    for slots in STEPS:
        step.set_(np.array(slots))
    assert before == {rows: [t.data_ptr() for t in step.route(rows)] for rows in before}


def test_new_step_has_base_rows_only(step: Step) -> None:
    assert not step.has_lora
    for rows in (1, 30, 64, 300):
        route = step.route(rows)
        assert (route.indices == -1).all()
        assert (route.plan[:, :2] == 0).all()


def test_too_many_tokens(step: Step) -> None:
    with pytest.raises(ValueError, match=r"slots must have at most 384 tokens, got 385"):
        step.set_(np.zeros(385, dtype=np.int64))
    with pytest.raises(ValueError, match=r"a step has at most 384 rows, got 500"):
        step.route(500)


def test_slots_of_adapter_ids() -> None:
    assert slots_of((7, 0, 9, 7, 0), {7: 2, 9: 0}).tolist() == [2, -1, 0, 2, -1]
    assert slots_of((), {}).tolist() == []
    with pytest.raises(KeyError):
        slots_of((3,), {7: 2})


@pytest.mark.gpu
def test_no_synchronisation(step: Step) -> None:
    step.set_(np.array([1, 2, -1]))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for slots in STEPS:
            step.set_(np.array(slots))
    finally:
        torch.cuda.set_sync_debug_mode("default")
