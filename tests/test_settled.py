"""Which tensors a launch in a graph may read early."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from loraplex import settled
from loraplex.settled import are_settled, forget


class Stream:
    """Whether launches go into a graph."""

    is_capturing = True


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream.is_capturing)
    return stream


def read_before(stream: Stream, *tensors: Tensor) -> None:
    """What a call outside of a graph does, as engines make one before they capture."""
    stream.is_capturing = False
    assert not are_settled(*tensors)
    stream.is_capturing = True


def test_only_what_was_read_before_and_not_written_since(stream: Stream) -> None:
    one, other = torch.zeros(3), torch.zeros(3)
    assert not are_settled(one)
    read_before(stream, one)
    assert are_settled(one)
    assert not are_settled(one, other)
    read_before(stream, one, other)
    assert are_settled(one, other)
    other.add_(1)
    assert not are_settled(one, other)
    assert are_settled(one, other)
    one[:1].zero_()
    assert not are_settled(one)
    forget(other)
    assert not are_settled(other)
    assert are_settled(other)


def test_nothing_outside_of_a_graph(stream: Stream) -> None:
    tensor = torch.zeros(3)
    stream.is_capturing = False
    assert not any(are_settled(tensor) for _ in range(3))
    stream.is_capturing = True
    assert are_settled(tensor), "reads outside of graphs count"


def test_what_a_graph_makes_is_not_settled(stream: Stream) -> None:
    """Compiled code reuses a tensor for the next weight, and the counter stays as it is."""
    weight = torch.zeros(3)
    assert not any(are_settled(weight) for _ in range(3))


def test_what_loraplex_writes_in_a_graph_is_settled_once_read() -> None:
    plan = torch.zeros(3)
    for _ in range(2):
        forget(plan)
        assert not are_settled(plan)
        assert are_settled(plan)


def test_views_of_what_is_written_are_not_settled(stream: Stream) -> None:
    plan = torch.zeros(3)
    view = plan[:2]
    read_before(stream, view)
    assert are_settled(view)
    forget(plan)
    assert not are_settled(view)


def test_other_memory_under_the_same_tensor_is_not_settled(stream: Stream) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    read_before(stream, weight)
    version, other = weight._version, torch.ones(3)
    weight.data = other
    assert weight._version == version
    assert not are_settled(weight)
    assert are_settled(weight)


def test_inference_tensors_are_weights(stream: Stream) -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
    read_before(stream, tensor)
    assert are_settled(tensor)
    forget(tensor)
    assert not are_settled(tensor)


def test_tensors_are_let_go() -> None:
    tensors = [torch.zeros(1) for _ in range(50)]
    are_settled(*tensors[:25])
    forget(*tensors[25:])
    keys = {id(tensor) for tensor in tensors}
    assert keys <= set(settled._known)
    del tensors
    gc.collect()
    assert not keys & set(settled._known)


def test_a_long_list_is_not_walked(stream: Stream) -> None:
    tensors = [torch.zeros(1)] * (settled.MOST_TENSORS + 1)
    read_before(stream, *tensors)
    assert not are_settled(*tensors)


def test_another_tensor_with_an_old_id_is_not_the_old_one(stream: Stream) -> None:
    old, new = torch.zeros(1), torch.zeros(1)
    read_before(stream, old)
    state = (new._version, new.data_ptr())
    settled._known[id(new)] = settled._known[id(old)]._replace(state=state)
    assert not are_settled(new)
    read_before(stream, new)
    assert are_settled(new)
