"""When an op is called without torch's dispatcher, and that it is asked whenever it has a say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex.ops.library import is_plain
from loraplex.testing import Case, build


class Subclass(Tensor):
    """Some library's own tensor."""


class Watching(TorchDispatchMode):
    """Some library's own mode."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_plain(around: Callable[[], AbstractContextManager[None]], device: torch.device) -> None:
    before = torch.zeros(2, 2, device=device)
    with around():
        x = torch.zeros(2, 2, device=device)
        weight = torch.nn.Parameter(x.clone(), requires_grad=False)
        assert is_plain(x, weight, None)
        assert is_plain(before, weight, x)


def test_plain_in_a_new_thread(device: torch.device) -> None:
    found = []
    x = torch.zeros(2, device=device)
    thread = threading.Thread(target=lambda: found.append(is_plain(x)))
    thread.start()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize(
    "around",
    [
        FakeTensorMode,
        Watching,
        profile,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("cpu"),
    ],
    ids=["fake", "mode", "profiler", "autocast", "default_device"],
)
def test_something_around(around: Callable[[], AbstractContextManager[None]]) -> None:
    x = torch.zeros(2)
    with around():
        assert not is_plain(x)
    assert is_plain(x)


def test_transforms_and_traces() -> None:
    found = []

    def look(x: Tensor) -> Tensor:
        found.append(is_plain(x))
        return x + 1

    torch.vmap(look)(torch.zeros(2, 2))
    torch.jit.trace(look, torch.zeros(2), check_trace=False)
    torch.func.functionalize(look)(torch.zeros(2))
    assert found == [False, False, False]


def test_tensors_that_are_not_plain() -> None:
    x = torch.zeros(2)
    negative = torch.zeros(2, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    others = [
        x.as_subclass(Subclass), torch.zeros(2, device="meta"), x.to_sparse(), negative,
        torch._to_functional_tensor(x),
    ]  # fmt: skip
    for other in others:
        assert not is_plain(x, other)
        assert not is_plain(other, x)
    assert is_plain(x, x)


def test_profilers_see_the_op(device: torch.device) -> None:
    case = Case("seen", m=3, k=32, slices=(16,), ranks=(8,), indices=(0, 0, -1))
    inputs = build(case, torch.float32, device)
    with profile() as seen:
        inputs.run("lora_linear", "torch")
    assert "loraplex::lora_linear" in {event.key for event in seen.key_averages()}
