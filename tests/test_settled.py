"""Which tensors a launch in a graph may read early."""

from __future__ import annotations

import gc

import pytest
import torch

from loraplex import settled
from loraplex.settled import are_settled, forget


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


@pytest.mark.usefixtures("capturing")
def test_only_what_was_read_before_and_not_written_since() -> None:
    one, other = torch.zeros(3), torch.zeros(3)
    assert not are_settled(one)
    assert are_settled(one)
    assert not are_settled(one, other)
    assert are_settled(one, other)
    other.add_(1)
    assert not are_settled(one, other)
    assert are_settled(one, other)
    one[:1].zero_()
    assert not are_settled(one)
    forget(other)
    assert not are_settled(other)


def test_nothing_outside_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not any(are_settled(tensor) for _ in range(3))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert are_settled(tensor), "reads outside of graphs count"


@pytest.mark.usefixtures("capturing")
def test_inference_tensors_are_weights() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
    assert not are_settled(tensor)
    assert are_settled(tensor)


@pytest.mark.usefixtures("capturing")
def test_tensors_are_let_go() -> None:
    tensors = [torch.zeros(1) for _ in range(50)]
    are_settled(*tensors)
    keys = {id(tensor) for tensor in tensors}
    assert keys <= set(settled._read)
    del tensors
    gc.collect()
    assert not keys & set(settled._read)


@pytest.mark.usefixtures("capturing")
def test_a_long_list_is_not_walked() -> None:
    tensors = [torch.zeros(1)] * (settled.MOST_TENSORS + 1)
    assert not are_settled(*tensors)
    assert not are_settled(*tensors)


@pytest.mark.usefixtures("capturing")
def test_another_tensor_with_an_old_id_is_not_the_old_one() -> None:
    old, new = torch.zeros(1), torch.zeros(1)
    are_settled(old)
    settled._read[id(new)] = settled._read[id(old)]
    assert not are_settled(new)
    assert are_settled(new)
