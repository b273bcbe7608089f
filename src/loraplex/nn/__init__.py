"""Layers with adapters, and the models that they are attached to."""

from loraplex.nn.attach import attach, detach
from loraplex.nn.linear import LoraLinear
from loraplex.nn.model import AttachedModel
from loraplex.nn.rowwise import LoraEmbedding

__all__ = ["AttachedModel", "LoraEmbedding", "LoraLinear", "attach", "detach"]
