"""CUDA graphs: captured once, right after tokens, tables and adapters change; no host waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import loraplex as lp
from loraplex.bench.verdict import judge
from loraplex.errors import UnsupportedImplError
from loraplex.ops.impls import TRITON_IMPLS
from loraplex.testing import GENERAL_IMPLS, Case, Inputs, build, eager, truth

pytestmark = pytest.mark.gpu

ROUTED = [(op, impl) for op in ("lora_linear", "add_lora") for impl in TRITON_IMPLS[op]]
ROWS = 16
CASE = Case(
    "graph", m=ROWS, k=512, slices=(256, 64), ranks=(16,) * 8, indices="identical",
    table="set", rank_multiple=8, max_tokens=ROWS,
)  # fmt: skip


def capture(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of ``run`` and its output; kernels are compiled before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    return graph, output


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=ROUTED, ids="-".join)
def step(
    request: pytest.FixtureRequest, device: torch.device
) -> tuple[str, Inputs, Callable[[], Tensor]]:
    """An op, its inputs, and one call that starts from the same y every time."""
    op, impl = request.param
    # every slot occurs once, so that build() has values for all of them
    case = replace(CASE, indices=tuple(range(8)) + (-1,) * (ROWS - 8))
    inputs = build(case, torch.bfloat16, device)
    y = torch.empty_like(inputs.y)

    def run() -> Tensor:
        if op == "lora_linear":
            return lp.lora_linear(inputs.x, inputs.weight, inputs.table, inputs.routing, impl=impl)
        y.copy_(inputs.y)
        return lp.add_lora_(y, inputs.x, inputs.table, inputs.routing, impl=impl)

    try:
        run()
    except UnsupportedImplError as refusal:
        if impl in GENERAL_IMPLS:
            raise
        pytest.skip(str(refusal))
    return op, inputs, run


def assert_right(op: str, inputs: Inputs, result: Tensor, rows: list[int]) -> None:
    indices = torch.tensor(rows, device=result.device)
    now = replace(inputs, indices=indices)
    verdict = judge(result, eager(op, now), truth(op, now))
    assert verdict.is_correct, str(verdict)


def test_K12_captured_with_one_adapter(
    step: tuple[str, Inputs, Callable[[], Tensor]],
) -> None:
    """Replayed over 1, 2, 5 and 8 adapters, base rows among them, then over fewer again."""
    op, inputs, run = step
    inputs.routing.update_([0] * ROWS)
    graph, output = capture(run)
    for count in (1, 2, 5, 8, 2, 0):
        rows = [row % count if count and row % 3 else -1 for row in range(ROWS)]
        inputs.routing.update_(torch.tensor(rows, device=output.device))
        graph.replay()
        assert_right(op, inputs, output, rows)
        first = output.clone()
        assert torch.equal(run(), first), "a replay gives the bits of a call"


def test_graph_sees_new_adapters(step: tuple[str, Inputs, Callable[[], Tensor]]) -> None:
    """Slots are set, replaced by another rank and cleared; the graph stays."""
    op, inputs, run = step
    rows = [row % 8 for row in range(ROWS)]
    inputs.routing.update_(rows)
    graph, output = capture(run)
    for change in ("swap", "larger", "clear"):
        parts = {slot: list(parts) for slot, parts in inputs.adapters.items()}
        if change == "swap":
            parts[0], parts[1] = parts[1], parts[0]
        elif change == "larger":
            parts[2] = build(
                Case("larger", m=1, k=512, slices=(256, 64), ranks=(24,), indices="identical"),
                torch.bfloat16, output.device,
            ).adapters[0]  # fmt: skip
        for slot in (0, 1, 2):
            now = parts[slot]
            inputs.table.set_(
                slot, [p.a for p in now], [p.b for p in now], [p.scaling for p in now]
            )
        if change == "clear":
            inputs.table.clear_(3)
            parts[3] = [replace(p, a=p.a[:0], b=p.b[:, :0]) for p in inputs.adapters[3]]
        graph.replay()
        assert_right(op, replace(inputs, adapters=parts), output, rows)


def test_graph_sees_new_activations_and_pools(device: torch.device) -> None:
    case = Case("graph_pools", m=4, k=256, slices=(128,), ranks=(16, 16), indices="mixed")
    inputs = build(case, torch.bfloat16, device)
    graph, output = capture(
        lambda: lp.lora_linear(inputs.x, inputs.weight, inputs.table, inputs.routing, impl="triton")
    )
    other = build(case, torch.bfloat16, device, seed=1)
    inputs.x.copy_(other.x)
    for mine, new in zip(inputs.pools[:2], other.pools[:2], strict=True):
        mine.copy_(new)
    graph.replay()
    values = replace(other, weight=inputs.weight)
    verdict = judge(output, eager("lora_linear", values), truth("lora_linear", values))
    assert verdict.is_correct, str(verdict)


def test_P06_no_host_synchronisation(step: tuple[str, Inputs, Callable[[], Tensor]]) -> None:
    """A step builds its routing once and runs its layers without a word to the host."""
    _, inputs, run = step
    indices = torch.tensor([row % 9 - 1 for row in range(ROWS)], device=inputs.x.device)
    inputs.routing.update_(indices)
    run()
    with no_synchronisation():
        inputs.routing.update_(indices)
        run()


@pytest.mark.parametrize("impl", TRITON_IMPLS["lora_linear"])
def test_calls_in_a_row_do_not_run_into_each_other(impl: str, device: torch.device) -> None:
    """Kernels may start before their predecessors end: 60 layers at once and one by one."""
    case = Case("chain", m=24, k=1024, slices=(768, 256), ranks=(16,) * 8, indices="uniform")
    layers = [build(case, torch.bfloat16, device, seed=seed) for seed in range(3)]

    def forward(*, is_waiting: bool) -> Tensor:
        x = layers[0].x
        for number in range(60):
            layer = layers[number % 3]
            y = lp.lora_linear(x, layer.weight, layer.table, layer.routing, impl=impl)
            x = torch.tanh(y)
            if is_waiting:
                torch.cuda.synchronize()
        return x

    try:
        expected = forward(is_waiting=True)
    except UnsupportedImplError as refusal:
        if impl in GENERAL_IMPLS:
            raise
        pytest.skip(str(refusal))
    for _ in range(10):
        assert torch.equal(forward(is_waiting=False), expected)
    graph, output = capture(lambda: forward(is_waiting=False))
    for _ in range(3):
        graph.replay()
        assert torch.equal(output, expected)


@pytest.mark.parametrize("impl", TRITON_IMPLS["multi_lora"])
def test_multi_lora_with_everything_on_the_device(impl: str, device: torch.device) -> None:
    case = Case("multi", m=9, k=256, slices=(128,), ranks=(16, 8), indices="mixed")
    inputs = build(case, torch.bfloat16, device)
    a, b, scaling, ranks = inputs.pools
    scaling, ranks = scaling.to(device), ranks.to(device)

    def run() -> Tensor:
        return lp.multi_lora(inputs.x, a, b, inputs.indices, scaling, ranks, impl=impl)

    run()
    with no_synchronisation():
        result = run()
    verdict = judge(result, eager("multi_lora", inputs), truth("multi_lora", inputs))
    assert verdict.is_correct, str(verdict)
    graph, output = capture(run)
    inputs.indices.copy_(inputs.indices.flip(0))
    graph.replay()
    flipped = judge(output, eager("multi_lora", inputs), truth("multi_lora", inputs))
    assert flipped.is_correct, str(flipped)


@pytest.mark.parametrize("impl", TRITON_IMPLS["multi_lora"])
def test_ranks_on_the_device_past_the_capacity(impl: str, device: torch.device) -> None:
    """Nobody has read them; they must not make a kernel leave its memory."""
    case = Case("wild_ranks", m=4, k=64, slices=(32,), ranks=(8, 8), max_rank=8)
    inputs = build(case, torch.bfloat16, device)
    a, b, scaling, _ = inputs.pools
    ranks = torch.tensor([8, 1 << 20], device=device)
    d = lp.multi_lora(inputs.x, a, b, inputs.indices, scaling.to(device), ranks, impl=impl)
    torch.cuda.synchronize()
    sound = inputs.indices == 0
    wanted = lp.multi_lora(inputs.x, a, b, inputs.indices, scaling.to(device), impl=impl)
    assert torch.equal(d[sound], wanted[sound])
