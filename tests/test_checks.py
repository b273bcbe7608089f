"""Checkers: what they accept, and messages that name argument, rule and value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loraplex import checks


def elements(tensor: Tensor) -> list[int]:
    """Addresses of all elements, in elements of the storage."""
    offsets = torch.zeros(tensor.shape, dtype=torch.int64)
    for axis, step in enumerate(tensor.stride()):
        shape = [1] * tensor.dim()
        shape[axis] = -1
        offsets += step * torch.arange(tensor.shape[axis]).reshape(shape)
    return (offsets + tensor.storage_offset()).flatten().tolist()


VIEWS = st.builds(
    lambda shape, strides, offset: torch.zeros(400).as_strided(shape, strides, offset),
    st.tuples(st.integers(0, 4), st.integers(1, 4)),
    st.tuples(st.integers(0, 20), st.integers(0, 20)),
    st.integers(0, 30),
)


@given(VIEWS)
def test_an_overlap_is_never_missed(tensor: Tensor) -> None:
    places = elements(tensor)
    if len(set(places)) < len(places):
        with pytest.raises(ValueError, match="y must not overlap itself, got shape .* strides"):
            checks.check_no_overlap("y", tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 6),
        torch.zeros(6, 4).T,
        torch.zeros(4, 6)[::2, 1::2],
        torch.zeros(1, 6).expand(1, 6),
        torch.zeros(1).expand(1, 1),
        torch.zeros(0, 3),
        torch.zeros(9).as_strided((1, 3), (0, 1)),
        torch.zeros(2, 3, 4).permute(2, 0, 1),
    ],
    ids=["dense", "transposed", "stepped", "row", "one", "empty", "stride_0_of_1", "permuted"],
)
def test_ordinary_layouts_do_not_overlap(tensor: Tensor) -> None:
    checks.check_no_overlap("y", tensor)


MEMORY = torch.zeros(400)
PART = st.builds(
    lambda shape, strides, offset: MEMORY.as_strided(shape, strides, offset),
    st.tuples(st.integers(0, 4), st.integers(1, 4)),
    st.tuples(st.sampled_from([0, 6, 12, 13]), st.integers(1, 3)),
    st.integers(0, 40),
)


@given(PART, PART)
def test_shared_memory_is_never_missed(y: Tensor, x: Tensor) -> None:
    if set(elements(y)) & set(elements(x)):
        with pytest.raises(ValueError, match="y must not share memory with x"):
            checks.check_disjoint("y", y, "x", x)


@given(st.lists(PART, max_size=5), PART)
def test_a_clear_tensor_shares_nothing(tensors: list[Tensor], y: Tensor) -> None:
    is_clear = checks.Spans(tensors).is_clear(y)
    places = set(elements(y))
    for tensor in tensors:
        assert not (is_clear and places & set(elements(tensor)))
    ends = [checks.memory_span(tensor) for tensor in tensors if tensor.numel()]
    first, last = checks.memory_span(y)
    if y.numel() and all(last <= start or end <= first for start, end in ends):
        assert is_clear


def test_columns_of_one_buffer_are_disjoint() -> None:
    buffer = torch.zeros(5, 12)
    for y, x in (
        (buffer[:, :4], buffer[:, 4:]),
        (buffer[:, 7:], buffer[:, :7]),
        (buffer[1:, 5:], buffer[:4, :5]),
        (buffer[:2], buffer[2:]),
        (buffer[:0], buffer),
    ):
        checks.check_disjoint("y", y, "x", x)


def test_memory_on_other_devices_is_disjoint() -> None:
    checks.check_disjoint("y", torch.zeros(2), "x", torch.zeros(2, device="meta"))


@pytest.mark.parametrize(
    ("shape", "wanted", "is_good"),
    [
        ((2, 3), [2, 3], True),
        ((2, 3), ["M", 3], True),
        ((0, 3), ["M", 3], True),
        ((2, 3), [3, 3], False),
        ((2, 3), ["M"], False),
        ((2,), ["M", 3], False),
        ((), [], True),
    ],
)
def test_shape(shape: tuple[int, ...], wanted: list[int | str], is_good: bool) -> None:
    tensor = torch.zeros(shape)
    if is_good:
        checks.check_shape("x", tensor, wanted)
        return
    with pytest.raises(ValueError) as caught:
        checks.check_shape("x", tensor, wanted)
    rule = ", ".join(str(size) for size in wanted)
    assert str(caught.value) == f"x must have shape [{rule}], got {shape}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "n must be an int, got True"),
        (1.0, "n must be an int, got 1.0"),
        ("1", "n must be an int, got '1'"),
        (None, "n must be an int, got None"),
        (-1, "n must be between 0 and 4, got -1"),
        (5, "n must be between 0 and 4, got 5"),
    ],
)
def test_int(value: object, message: str) -> None:
    assert [checks.check_int("n", good, 0, 4) for good in (0, 4)] == [0, 4]
    with pytest.raises((TypeError, ValueError)) as caught:
        checks.check_int("n", value, 0, 4)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [1, 0.5, -3.0, 0])
def test_number(value: float) -> None:
    assert checks.check_number("scaling", value) == value


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (True, TypeError), ("1", TypeError), (None, TypeError), (torch.ones(()), TypeError),
        (float("inf"), ValueError), (float("nan"), ValueError), (1e39, ValueError),
    ],
    ids=str,
)  # fmt: skip
def test_bad_number(value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="scaling must be"):
        checks.check_number("scaling", value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_range(dtype: torch.dtype) -> None:
    checks.check_index_range("indices", torch.tensor([-1, 0, 2], dtype=dtype), 3)
    checks.check_index_range("indices", torch.tensor([], dtype=dtype), 0)
    checks.check_index_range("indices", torch.tensor([-1], dtype=dtype), 0)
    for bad in (-2, 3):
        with pytest.raises(ValueError, match=rf"between -1 .* - 1 = 2, got {bad}"):
            checks.check_index_range("indices", torch.tensor([0, bad], dtype=dtype), 3)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(4, 8), True),
        (torch.zeros(4, 9), False),
        (torch.zeros(1, 9), True),
        (torch.zeros(4, 16)[:, 4:12], True),
        (torch.zeros(4, 16)[:, 1:9], False),
        (torch.zeros(4, 8, dtype=torch.float16), True),
        (torch.zeros(4, 12, dtype=torch.float16), False),
        (torch.zeros(8).expand(4, 8), True),
    ],
)
def test_aligned_rows(tensor: Tensor, expected: bool) -> None:
    assert checks.is_aligned(tensor) is expected
