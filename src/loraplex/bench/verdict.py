"""Is a result right? Judged by float64, with eager torch in the same dtype as the yardstick."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """How far a result is from float64.

    Attributes:
        is_correct: the largest error is at most twice eager's, plus one rounding of the dtype.
        max_error: largest absolute error, at ``position``, where ``got`` stands for ``expected``.
        bound: what ``max_error`` had to stay below.
        relative_error: norm of the error over the norm of the float64 result.
        eager_relative_error: the same for eager torch.
    """

    is_correct: bool
    max_error: float
    position: tuple[int, ...]
    got: float
    expected: float
    bound: float
    relative_error: float
    eager_relative_error: float

    def __str__(self) -> str:
        word = "correct" if self.is_correct else "WRONG"
        return (
            f"{word}: largest error {self.max_error:.3g} (bound {self.bound:.3g}) at "
            f"{list(self.position)}: {self.got:.6g} for {self.expected:.6g}; relative to float64 "
            f"{self.relative_error:.2e} (eager torch {self.eager_relative_error:.2e})"
        )


def judge(result: Tensor, eager: Tensor, truth: Tensor, *, slack: float = 0.0) -> Verdict:
    """Compare a result with float64.

    Args:
        result: what is judged; NaN and infinity are wrong.
        eager: what plain torch gives in the dtype of ``result``.
        truth: the float64 result.
        slack: allowed on top, for results so small in number that eager may be exact by luck.

    Example:
        >>> truth = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        >>> judge(torch.tensor([[1.0, 2.5]]), truth.float(), truth).position
        (0, 1)
    """
    error = (result.double() - truth).abs().nan_to_num(nan=torch.inf)
    eager_error = (eager.double() - truth).abs()
    where = int(error.argmax())
    position = tuple(int(i) for i in torch.unravel_index(torch.tensor(where), truth.shape))
    rounding = torch.finfo(result.dtype).eps / 2 * float(truth.abs().max())
    bound = 2 * float(eager_error.max()) + rounding + slack
    largest = float(error.flatten()[where])
    norm = max(float(truth.norm()), torch.finfo(torch.float64).tiny)
    return Verdict(
        is_correct=largest <= bound,
        max_error=largest,
        position=position,
        got=float(result[position]),
        expected=float(truth[position]),
        bound=bound,
        relative_error=float(error.norm()) / norm,
        eager_relative_error=float(eager_error.norm()) / norm,
    )
