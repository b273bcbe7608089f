"""A linear layer that adds each token's own adapter."""

from __future__ import annotations

from torch import Tensor, nn

from loraplex.nn.layers import oriented_weight
from loraplex.nn.step import StepHolder
from loraplex.ops.lora_linear import lora_linear
from loraplex.table import AdapterTable


class LoraLinear(nn.Module):
    """Stands in for a linear layer of a model, with the same parameters under the same names.

    Semantics, for a token whose row uses an adapter::

        y = column_scale * (x @ W.T + scaling * (x @ A.T) @ B.T) + bias + adapter_bias

    Where no row of the step has an adapter that changes this layer, the layer it stands in for
    runs instead, untouched.

    Args:
        base: the layer, ``torch.nn.Linear`` or GPT-2's ``Conv1D``.
        name: its path in the model.
        table: the adapters of this layer.
        steps: where the model leaves the running step.
        impl: implementation of :func:`loraplex.lora_linear`.
    """

    def __init__(
        self, base: nn.Linear, *, name: str, table: AdapterTable, steps: StepHolder, impl: str
    ) -> None:
        super().__init__()
        # Not a submodule: `model.state_dict()` keeps its keys, and whatever replaces a parameter
        # here replaces it in the base layer too, because the two share one dictionary.
        object.__setattr__(self, "base", base)
        self._parameters = base._parameters
        self.name = name
        self.table = table
        self.impl = impl
        self._steps = steps
        self.training = base.training

    base: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``x`` [batch, length, K] or [batch * length, K]."""
        step = self._steps.current
        if step is None or self.name not in step.layers:
            out: Tensor = self.base(x)
            return out
        routing = step.routing(self.name, x.shape)
        y = lora_linear(
            x.reshape(-1, x.shape[-1]),
            oriented_weight(self.base),
            self.table,
            routing,
            bias=self.base.bias,
            impl=self.impl,
        )
        return y.view(*x.shape[:-1], y.shape[-1])

    @property
    def in_features(self) -> int:
        """K."""
        return self.table.in_features

    @property
    def out_features(self) -> int:
        """N."""
        return self.table.out_features

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.base.bias is not None}, num_adapters={self.table.num_adapters}"
        )
