"""Problem -> choice: a pure function over JSON tables, one per GPU architecture."""

from loraplex.tuning.choose import Choice, choose
from loraplex.tuning.problem import Problem
from loraplex.tuning.stretches import Stretch, stretches

__all__ = ["Choice", "Problem", "Stretch", "choose", "stretches"]
