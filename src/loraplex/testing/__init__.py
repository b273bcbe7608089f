"""Problems with known answers, for the tests.

A :class:`Case` describes one problem; :func:`build` makes its tensors, with NaN wherever an op has
no business reading; :func:`truth` and :func:`eager` answer it in float64 and in plain torch.
"""

from loraplex.testing.blocks import changed_blocks, tuning_table
from loraplex.testing.build import Inputs, build
from loraplex.testing.case import CASES, GENERAL_IMPLS, OPS, Case
from loraplex.testing.memory import LAYOUTS, is_surrounding_untouched, lay_out, poisoned_memory
from loraplex.testing.oracles import eager, order_slack, truth

__all__ = [
    "CASES",
    "GENERAL_IMPLS",
    "LAYOUTS",
    "OPS",
    "Case",
    "Inputs",
    "build",
    "changed_blocks",
    "eager",
    "is_surrounding_untouched",
    "lay_out",
    "order_slack",
    "poisoned_memory",
    "truth",
    "tuning_table",
]
