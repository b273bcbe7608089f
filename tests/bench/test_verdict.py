"""The rule by which a result is right."""

from __future__ import annotations

import pytest
import torch

from loraplex.bench.verdict import judge


@pytest.fixture
def product() -> tuple[torch.Tensor, torch.Tensor]:
    """A product in float16 and in float64."""
    x, c = torch.randn(9, 64), torch.randn(64, 33)
    return (x.half() @ c.half()), x.half().double() @ c.half().double()


def test_eager_is_right_about_itself(product: tuple[torch.Tensor, torch.Tensor]) -> None:
    eager, truth = product
    verdict = judge(eager, eager, truth)
    assert verdict.is_correct
    assert verdict.relative_error == verdict.eager_relative_error > 0


def test_position_and_values_of_the_largest_error(
    product: tuple[torch.Tensor, torch.Tensor],
) -> None:
    eager, truth = product
    spoiled = eager.clone()
    spoiled[3, 20] += 2
    verdict = judge(spoiled, eager, truth)
    assert not verdict.is_correct
    assert verdict.position == (3, 20)
    assert verdict.got == float(spoiled[3, 20])
    assert verdict.expected == float(truth[3, 20])
    assert verdict.max_error == pytest.approx(2, rel=1e-2)
    assert "WRONG: largest error 2" in str(verdict)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_is_wrong(value: float, product: tuple[torch.Tensor, torch.Tensor]) -> None:
    eager, truth = product
    spoiled = eager.clone()
    spoiled[8, 32] = value
    verdict = judge(spoiled, eager, truth)
    assert not verdict.is_correct
    assert verdict.position == (8, 32)


def test_bound_is_twice_eager_plus_a_rounding_plus_slack() -> None:
    truth = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    eager = torch.tensor([[1.0, 2.25]])
    rounding = 2.0 * torch.finfo(torch.float32).eps / 2
    assert judge(eager, eager, truth).bound == pytest.approx(0.5 + rounding, rel=1e-9)
    assert judge(eager, eager, truth, slack=1.0).bound == pytest.approx(1.5 + rounding, rel=1e-9)
    assert judge(torch.tensor([[1.5, 2.0]]), eager, truth).is_correct
    assert not judge(torch.tensor([[1.51, 2.0]]), eager, truth).is_correct


def test_zero_result() -> None:
    zero = torch.zeros(2, 2)
    verdict = judge(zero, zero, zero.double())
    assert verdict.is_correct
    assert verdict.relative_error == 0
