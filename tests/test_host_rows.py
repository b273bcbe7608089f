"""Rows in host memory are not written while the device may still read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import loraplex as lp
from loraplex.host_rows import SHORTEST, HostRows


class Moment:
    """An event that is over when the test says so."""

    def __init__(self) -> None:
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


class FakeRows(HostRows):
    """On a device without streams: the test ends the work that reads a row."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.moments: list[Moment] = []

    def _new_row(self, length: int) -> torch.Tensor:
        return torch.full((length,), -99, dtype=torch.int32)

    def _end(self) -> Any:
        self.moments.append(Moment())
        return self.moments[-1]


def test_a_row_is_written_again_only_after_its_work() -> None:
    rows = FakeRows()
    with rows.holding(torch.tensor([1, 2, 3])) as first:
        assert first.tolist() == [1, 2, 3]
        assert first.dtype == torch.int32
    with rows.holding(torch.tensor([4, 5])) as second:
        assert second.tolist() == [4, 5]
    assert first.tolist() == [1, 2, 3], "its work has not ended"
    assert len(rows) == 2
    rows.moments[0].is_over = True
    with rows.holding(torch.tensor([6])) as third:
        assert third.data_ptr() == first.data_ptr()
        assert len(rows) == 1, "nobody else gets a row that is being filled"
    assert second.tolist() == [4, 5]
    assert len(rows) == 2


def test_a_row_that_is_too_short_stays_for_others() -> None:
    rows = FakeRows()
    with rows.holding(torch.arange(SHORTEST)) as short:
        pass
    rows.moments[0].is_over = True
    with rows.holding(torch.arange(SHORTEST + 1)) as long:
        assert long.tolist() == list(range(SHORTEST + 1))
    with rows.holding(torch.arange(1)) as again:
        assert again.data_ptr() == short.data_ptr()


def test_a_launch_that_fails_gives_its_row_back() -> None:
    rows = FakeRows()
    with pytest.raises(RuntimeError, match="injected"), rows.holding(torch.arange(2)):
        raise RuntimeError("injected")
    assert len(rows) == len(rows.moments) == 1, "and not before what was launched has ended"


@pytest.mark.gpu
def test_updates_from_lists_queue_up_without_the_host(device: torch.device) -> None:
    routing = lp.Routing.allocate(8, num_adapters=64, device=device)
    routing.update_([0] * 8)  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second: the host may be slow, too
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    seen = []
    try:
        for step in range(40):
            routing.update_([step, -1, step + 1] if step % 2 else [step] * 8)
            seen.append(routing.indices.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query(), "the host waited for the device"
    for step, indices in enumerate(seen):
        assert indices.tolist() == ([step, -1, step + 1] if step % 2 else [step] * 8)


@pytest.mark.gpu
def test_queued_work_outlives_the_routing(device: torch.device) -> None:
    lp.Routing.from_indices([0], num_adapters=64, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    seen = [
        lp.Routing.from_indices([step] * 4, num_adapters=64, device=device).indices
        for step in range(20)
    ]
    assert [indices.tolist() for indices in seen] == [[step] * 4 for step in range(20)]
