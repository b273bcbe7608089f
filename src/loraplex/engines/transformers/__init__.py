"""Batches of requests, each with its own adapter, on a transformers model."""

from loraplex.engines.transformers.generator import Completion, Generator, load_model
from loraplex.engines.transformers.requests import Request, RequestError, parse_request

__all__ = ["Completion", "Generator", "Request", "RequestError", "load_model", "parse_request"]
