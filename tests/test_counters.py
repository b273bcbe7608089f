"""Counters that are zero between launches: whose they are, and what is refused."""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from loraplex import counters
from loraplex.counters import BLOCK, PER_STREAM, STREAMS, counters_of, reserve_counters
from loraplex.errors import LoraplexError

GPU = torch.device("cuda", 0)


def test_count_above_the_limit(device: torch.device) -> None:
    assert counters_of(device, PER_STREAM).numel() >= PER_STREAM
    with pytest.raises(LoraplexError, match=f"count must be at most {PER_STREAM}, got 8193"):
        counters_of(device, PER_STREAM + 1)


def test_zeros_on_the_host() -> None:
    reserve_counters(torch.device("cpu"))
    given = counters_of(torch.device("cpu"), 7)
    assert given.shape == (7,)
    assert given.dtype == torch.int32
    assert not given.any()
    given += 1
    assert not counters_of(torch.device("cpu"), 7).any()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of the current stream of every device, whose counters lie in host memory."""
    current = [0]

    @functools.cache
    def block(index: int, number: int) -> Tensor:
        return torch.zeros(BLOCK, PER_STREAM, dtype=torch.int32)

    monkeypatch.setattr(counters, "_rows", {})
    monkeypatch.setattr(counters, "_block", block)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: current[0], raising=False
    )
    return current


def test_each_stream_of_each_device_has_its_own(stream: list[int]) -> None:
    given = {}
    for number in (7, 0, 140_000_000_000_000):
        for index in (1, 0):
            stream[0] = number
            given[index, number] = counters_of(torch.device("cuda", index), 5)
    assert len({row.data_ptr() for row in given.values()}) == len(given)
    for (index, number), row in given.items():
        row += 1
        stream[0] = number
        assert counters_of(torch.device("cuda", index), 9).data_ptr() == row.data_ptr()
    for row in given.values():
        assert row.numel() >= 5
        assert (row == 1).all(), "rows overlap"


def test_more_streams_than_rows(stream: list[int]) -> None:
    given = []
    for number in range(STREAMS):
        stream[0] = number
        given.append(counters_of(GPU, 1))
    assert len({row.data_ptr() for row in given}) == STREAMS
    stream[0] = STREAMS
    with pytest.raises(LoraplexError, match=f"must be at most {STREAMS} per device"):
        counters_of(GPU, 1)
    # the others go on, and so does another device
    stream[0] = 0
    counters_of(GPU, 1)
    counters_of(torch.device("cuda", 1), 1)


def test_threads_that_come_at_once_get_rows_of_their_own(
    stream: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(index: int) -> int:
        number = row_number(index)
        time.sleep(0.01)
        return number

    row_number = counters._row_number
    monkeypatch.setattr(counters, "_row_number", slowly)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda _: threading.get_ident(), raising=False
    )
    meet = threading.Barrier(8)

    def first_call(_: int) -> int:
        meet.wait()
        return counters_of(GPU, 1).data_ptr()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(first_call, range(8)))) == 8


def test_nothing_reserved_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(counters, "_block", functools.cache(counters._block.__wrapped__))
    for _ in range(2):
        with pytest.raises(LoraplexError, match="make an AdapterTable on the device first"):
            reserve_counters(GPU)
    with pytest.raises(LoraplexError, match="more than 16 streams came by"):
        counters._block(0, 1)


@pytest.mark.gpu
class TestOnTheGpu:
    def test_rows_of_streams(self, device: torch.device) -> None:
        streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        rows = []
        for _ in range(2):
            for stream in streams:
                with torch.cuda.stream(stream):
                    rows.append(counters_of(device, 100))
        pointers = [row.data_ptr() for row in rows]
        assert pointers[:3] == pointers[3:]
        assert len(set(pointers)) == 3
        for row in rows:
            assert row.device == device
            assert row.dtype == torch.int32
            assert row.numel() >= PER_STREAM
            assert not row[:PER_STREAM].any()

    def test_nothing_reserved_inside_a_capture(
        self, device: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(counters, "_rows", {})
        monkeypatch.setattr(counters, "_block", functools.cache(counters._block.__wrapped__))
        kept = torch.zeros(1, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept += 1
            with pytest.raises(LoraplexError, match="make an AdapterTable on the device first"):
                counters_of(device, 1)
        reserve_counters(device)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            kept += 1
            assert counters_of(device, 1).numel() >= 1
        # the capture that was refused is none the worse for it
        graph.replay()
        assert int(kept) == 1
