"""Layers with adapters, and the models that they are attached to."""

from loraplex.nn.attach import attach, detach
from loraplex.nn.linear import LoraLinear
from loraplex.nn.model import AttachedModel

__all__ = ["AttachedModel", "LoraLinear", "attach", "detach"]
