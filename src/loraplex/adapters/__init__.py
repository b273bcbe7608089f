"""Adapter folders → host tensors and a spec, laid out on a model's layers; knows no GPUs."""

from loraplex.adapters.adapter import (
    Adapter,
    EmbeddingLora,
    ModuleLora,
    ParameterLora,
    TokenRows,
)
from loraplex.adapters.base_copies import check_base_copies
from loraplex.adapters.load import load_adapter
from loraplex.adapters.match import Matching, match
from loraplex.adapters.shapes import LayerLora, LayerShape, shape_in_model
from loraplex.adapters.spec import AdapterSpec

__all__ = [
    "Adapter",
    "AdapterSpec",
    "EmbeddingLora",
    "LayerLora",
    "LayerShape",
    "Matching",
    "ModuleLora",
    "ParameterLora",
    "TokenRows",
    "check_base_copies",
    "load_adapter",
    "match",
    "shape_in_model",
]
