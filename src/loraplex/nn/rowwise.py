"""A module in which some rows of the batch have weights of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from loraplex.nn.step import StepHolder


class Rowwise(nn.Module):
    """Stands in for an embedding, a norm or a head; has its parameters under the same names.

    Semantics: the module runs on the whole batch as it always does, then the rows whose adapters
    have a :class:`~loraplex.nn.parts.Part` for it take that one's output. Rows without get the
    bits of the module alone.

    Args:
        base: the module.
        name: its path in the model.
        steps: where the model leaves the running step.
    """

    def __init__(self, base: nn.Module, *, name: str, steps: StepHolder) -> None:
        super().__init__()
        # Not a submodule, and one dictionary of parameters: as in LoraLinear.
        object.__setattr__(self, "base", base)
        self._parameters = base._parameters
        self.name = name
        self._steps = steps
        self.training = base.training

    base: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Apply the module to ``x`` [batch, ...]."""
        step = self._steps.current
        if step is None or self.name not in step.parts:
            out: Tensor = self.base(x)
            return out
        selected = step.select(self.name, x)
        part, rows = selected[0]
        if rows is None:
            return part.own_output(x, x if part.is_whole else self.base(x))
        y: Tensor = self.base(x)
        for part, rows in selected:
            assert rows is not None
            own = part.own_output(x.index_select(0, rows), y.index_select(0, rows))
            y = y.index_copy(0, rows, own)
        return y

    def __getattr__(self, name: str) -> Any:
        # What others read of the module: embedding_dim, variance_epsilon, out_features, ...
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return repr(self.base)


class LoraEmbedding(Rowwise):
    """A token embedding with LoRA: ``W[id] + scaling * A[:, id] @ B.T``, a gather per adapter."""
