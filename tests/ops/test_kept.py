"""Calls that are repeated: the same bits, and the long way wherever it matters."""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from loraplex import env
from loraplex.kernels.launch import launch
from loraplex.ops import kept
from loraplex.testing import Case, Inputs, build
from loraplex.tuning import Problem, choose

MIXED = Case(
    "kept_mixed", m=20, k=256, slices=(64, 32), ranks=(8, 24, 0, 16), max_rank=24, indices="mixed",
    rank_multiple=8, has_bias=True,
)  # fmt: skip
CASES = (
    MIXED,
    replace(MIXED, name="kept_one", m=1, slices=(96,)),
    replace(MIXED, name="kept_base", indices="base"),
    replace(MIXED, name="kept_extras", has_column_scale=True, has_adapter_bias=True),
    Case("kept_odd", m=21, k=203, slices=(41, 19), ranks=(3, 24, 0, 1), indices="mixed"),
)


@pytest.fixture(autouse=True)
def calls() -> Iterator[dict[Any, Any]]:
    """The kept calls, none at first."""
    none: dict[Any, Any] = {}
    with mock.patch.object(kept, "_calls", none):
        yield none


class TestOnTheHost:
    """What is decided before anything is launched, with a kernel that only pretends."""

    @pytest.fixture(autouse=True)
    def _gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kept, "is_on_current_gpu", lambda x: True)
        monkeypatch.setattr(kept, "is_capturing", lambda: False)
        monkeypatch.setattr(kept, "is_watched", lambda: False)
        monkeypatch.setattr(kept, "current_stream", lambda device: 5)
        monkeypatch.setattr(env, "has_triton", lambda: True)

    problem = Problem("lora_linear", 4, 64, (8,), 2, 8, "float32", "sm_90")

    class Kernel:
        """Compiled already; notes what is launched."""

        arg_names = ("x_ptr", "y_ptr", "room_ptr", "SIZE")

        def __init__(self) -> None:
            self.pre_run_hooks: list[Any] = []
            self.launched: list[tuple[Any, ...]] = []
            self.compiled = SimpleNamespace(
                metadata=SimpleNamespace(target=SimpleNamespace(backend="cuda")),
                run=lambda *given: self.launched.append(given), function=7, packed_metadata=(),
            )  # fmt: skip

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **constants: self.compiled

    def ask(self, x: Tensor) -> kept.Asked | None:
        return kept.ask((x,), (), [8], [8], "fused")

    def call(self, kernel: Kernel, x: Tensor, extra: Callable[[], object] = int) -> Tensor:
        """As an op does it."""
        asked = self.ask(x)
        if asked is not None and (found := kept.repeat(asked, list)) is not None:
            return found

        def run() -> Tensor:
            y, room = torch.empty((4, 8)), torch.empty((3, 5), dtype=torch.int64)
            extra()
            launch(kernel, (2,), x, y, room, SIZE=64)
            return y

        if asked is None:
            return run()
        choice = choose(self.problem, "fused")
        return kept.keep(asked, choice, run, self.problem, "fused")

    def test_second_call_is_repeated(self) -> None:
        kernel = self.Kernel()
        self.call(kernel, torch.zeros(4, 64))
        assert kernel.launched == [], "the kernel itself was asked"
        x = torch.zeros(4, 64)
        y = self.call(kernel, x)
        ((*head, own_x, own_y, room, size),) = kernel.launched
        assert head == [2, 1, 1, 5, 7, (), None, None, None]
        assert (own_x, own_y, size) == (x.data_ptr(), y.data_ptr(), 64)
        assert y.shape == (4, 8)
        assert room not in (own_x, own_y)

    @pytest.mark.parametrize(
        "other",
        [
            torch.zeros(4, 64, dtype=torch.float16),
            torch.zeros(5, 64),
            torch.zeros(4, 128)[:, :64],
            torch.zeros(64, 4).T,
            torch.zeros(4 * 64 + 4)[1:257].view(4, 64),
        ],
        ids=["dtype", "shape", "stride", "transposed", "unaligned"],
    )
    def test_other_tensors_go_the_long_way(self, other: Tensor) -> None:
        kernel = self.Kernel()
        self.call(kernel, torch.zeros(4, 64))
        self.call(kernel, other)
        assert kernel.launched == []

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("is_on_current_gpu", False),
            ("is_capturing", True),
            ("is_watched", True),
            ("precision_of", "tf32"),
        ],
    )
    def test_other_circumstances_go_the_long_way(
        self, name: str, value: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernel = self.Kernel()
        self.call(kernel, torch.zeros(4, 64))
        monkeypatch.setattr(kept, name, lambda *given: value)
        self.call(kernel, torch.zeros(4, 64))
        assert kernel.launched == []

    def test_hooks_of_a_kernel_are_not_passed_over(self) -> None:
        kernel = self.Kernel()
        self.call(kernel, torch.zeros(4, 64))
        kernel.pre_run_hooks.append(print)
        self.call(kernel, torch.zeros(4, 64))
        assert kernel.launched == []
        kernel.pre_run_hooks.clear()
        self.call(kernel, torch.zeros(4, 64))
        assert len(kernel.launched) == 1

    def test_another_choice_is_kept_anew(self) -> None:
        kernel = self.Kernel()
        self.call(kernel, torch.zeros(4, 64))
        choose.cache_clear()
        self.call(kernel, torch.zeros(4, 64))
        assert kernel.launched == []
        self.call(kernel, torch.zeros(4, 64))
        assert len(kernel.launched) == 1

    @pytest.mark.parametrize(
        "extra",
        [
            lambda: torch.zeros(3),
            lambda: torch.ones(3).sum(),
            lambda: torch.empty(3).fill_(1.0),
        ],
        ids=["zeros", "sum", "fill"],
    )
    def test_a_call_that_computes_with_torch_is_not_kept(
        self, extra: Callable[[], object], calls: dict[Any, Any]
    ) -> None:
        kernel = self.Kernel()
        for _ in range(3):
            self.call(kernel, torch.zeros(4, 64), extra)
        assert kernel.launched == []
        assert list(calls.values()) == [None]

    def test_nothing_kept(self, calls: dict[Any, Any]) -> None:
        kernel = self.Kernel()
        with kept.nothing_kept():
            self.call(kernel, torch.zeros(4, 64))
        assert calls == {}
        self.call(kernel, torch.zeros(4, 64))
        with kept.nothing_kept():
            self.call(kernel, torch.zeros(4, 64))
        assert kernel.launched == []

    def test_no_more_than_so_many(
        self, calls: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kept, "MOST_CALLS", 3)
        for rows in range(1, 8):
            self.call(self.Kernel(), torch.zeros(rows, 64))
            assert 1 <= len(calls) <= 3


def fresh(inputs: Inputs) -> Inputs:
    """The same values at other addresses."""
    return dataclasses.replace(inputs, x=inputs.x.clone(), weight=inputs.weight.clone())


def asked_of_triton() -> Any:
    from triton.runtime.jit import JITFunction

    return mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run)


@pytest.mark.gpu
@pytest.mark.usefixtures("shipped_tables")
class TestOnTheGpu:
    """Bits of a repeated call against those of the long way."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_bits(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        inputs = build(case, dtype, device)
        inputs.run("lora_linear", "fused")
        for _ in range(3):
            own = fresh(inputs)
            own.x.normal_()
            with asked_of_triton() as asked:
                result = own.run("lora_linear", "fused")
            assert not asked.called, "the second call is a repetition"
            with kept.nothing_kept():
                assert torch.equal(own.run("lora_linear", "fused"), result)

    def test_other_indices(self, device: torch.device) -> None:
        inputs = build(MIXED, torch.float16, device)
        inputs.run("lora_linear", "fused")
        for number in (-1, 0, 1, 3):
            inputs.routing.update_([number] * MIXED.m)
            result = inputs.run("lora_linear", "fused")
            with kept.nothing_kept():
                assert torch.equal(inputs.run("lora_linear", "fused"), result)

    def test_own_stream(self, device: torch.device) -> None:
        inputs = build(MIXED, torch.float16, device)
        wanted = inputs.run("lora_linear", "fused")
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            inputs.x.mul_(2)
            result = inputs.run("lora_linear", "fused")
        stream.synchronize()
        with kept.nothing_kept():
            assert torch.equal(inputs.run("lora_linear", "fused"), result)
        assert not torch.equal(result, wanted)

    def test_graph(self, device: torch.device) -> None:
        inputs = build(MIXED, torch.bfloat16, device)
        for _ in range(2):
            inputs.run("lora_linear", "fused")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = inputs.run("lora_linear", "fused")
        inputs.x.normal_()
        graph.replay()
        assert torch.equal(captured, inputs.run("lora_linear", "fused"))

    def test_no_synchronisation(self, device: torch.device) -> None:
        inputs = build(MIXED, torch.bfloat16, device)
        inputs.run("lora_linear", "fused")
        torch.cuda.set_sync_debug_mode("error")
        try:
            inputs.run("lora_linear", "fused")
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_hooks_are_called(self, device: torch.device) -> None:
        from triton import knobs

        inputs = build(MIXED, torch.float16, device)
        wanted = inputs.run("lora_linear", "fused")
        names: list[str] = []
        hook = lambda metadata: names.append(metadata.get()["name"])  # noqa: E731
        knobs.runtime.launch_enter_hook.add(hook)
        try:
            assert torch.equal(inputs.run("lora_linear", "fused"), wanted)
        finally:
            knobs.runtime.launch_enter_hook.remove(hook)
        assert names
        assert all(name.endswith("_kernel") for name in names)

    def test_threads(self, device: torch.device) -> None:
        inputs = build(MIXED, torch.float16, device)
        wanted = inputs.run("lora_linear", "fused")
        found: list[bool] = []

        def work() -> None:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                for _ in range(50):
                    result = fresh(inputs).run("lora_linear", "fused")
                    found.append(torch.equal(result, wanted))

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 200


def test_interpreted_calls_stay_as_they_are(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, calls: dict[Any, Any]
) -> None:
    """The interpreter launches nothing that could be repeated."""
    if device.type == "cuda":
        pytest.skip("on a GPU nothing is interpreted")
    monkeypatch.setattr(kept, "is_on_current_gpu", lambda x: True)
    monkeypatch.setattr(kept, "is_capturing", lambda: False)
    module = importlib.import_module("loraplex.ops.fused")
    inputs = build(MIXED, torch.float32, device)
    with mock.patch.object(module, "run_shrink", side_effect=module.run_shrink) as shrink:
        results = [inputs.run("lora_linear", "fused") for _ in range(3)]
    assert shrink.call_count == 3
    assert list(calls.values()) == [None]
    assert torch.equal(results[0], results[2])
