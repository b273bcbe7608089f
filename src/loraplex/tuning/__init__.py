"""Problem -> choice: a pure function over JSON tables, one per GPU architecture."""

from loraplex.tuning.choose import Choice, choose
from loraplex.tuning.problem import Problem

__all__ = ["Choice", "Problem", "choose"]
