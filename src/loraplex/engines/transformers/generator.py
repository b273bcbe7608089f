"""Greedy generation for requests with different adapters in one batch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loraplex.adapters import load_adapter
from loraplex.engines.transformers.requests import Request, RequestError, parse_request
from loraplex.nn import AttachedModel, attach
from loraplex.nn.library import import_transformers


@dataclass(frozen=True)
class Completion:
    """The answer to one request."""

    text: str
    tokens: tuple[int, ...]
    finish: str  # "stop": the model ended it; "length": max_new_tokens did


class Generator:
    """A model with adapters that serves batches of requests.

    Example:
        >>> from loraplex.demo import load_demo_model
        >>> from loraplex.engines.transformers import Generator, Request
        >>> model, tokenizer, adapters = load_demo_model()
        >>> generator = Generator(model, tokenizer, {"shout": adapters["shout"]})
        >>> [c.text for c in generator.run([Request("What is a key for?", "shout")])]
        ['WITH A KEY YOU CAN OPEN A DOOR!!!']
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        adapters: Mapping[str, str | os.PathLike[str]],
        *,
        max_batch: int = 16,
        impl: str = "auto",
    ) -> None:
        loaded = {name: load_adapter(path) for name, path in adapters.items()}
        self.model: AttachedModel = attach(
            model,
            # A batch has no more adapters than rows.
            max_adapters=max(1, min(len(loaded), max_batch)),
            max_rank=max((adapter.max_rank for adapter in loaded.values()), default=1) or 1,
            impl=impl,
        )
        for name, adapter in loaded.items():
            self.model.add_adapter(name, adapter)
        self.max_batch = max_batch
        self.tokenizer = tokenizer
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        ends = model.generation_config.eos_token_id
        if ends is None:
            ends = tokenizer.eos_token_id
        self._ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self._room = getattr(model.config, "max_position_embeddings", None)

    def read(self, line: str | bytes, *, max_new_tokens: int = 64) -> Request:
        """Read a request and make sure that this model can serve it.

        Raises:
            RequestError: as :func:`parse_request` and :meth:`check`.
        """
        request = parse_request(line, max_new_tokens=max_new_tokens)
        try:
            self.check(request)
        except RequestError as error:
            error.id = request.id
            raise
        return request

    def check(self, request: Request) -> None:
        """Refuse a request that this model cannot serve.

        Raises:
            RequestError: unknown adapter, or the prompt and its answer do not fit the model.
        """
        known = self.model.adapter_names()
        if request.adapter is not None and request.adapter not in known:
            names = ", ".join(map(repr, known)) or "none"
            raise RequestError(f"adapter is {request.adapter!r}, the adapters are: {names}")
        length = self._length(request)
        if length == 0:
            raise RequestError("prompt has no tokens")
        if self._room is not None and length + request.max_new_tokens > self._room:
            raise RequestError(
                f"prompt of {length} tokens and max_new_tokens = {request.max_new_tokens} exceed "
                f"the {self._room} positions of the model"
            )

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Serve one batch, at most ``max_batch`` requests, each with its own adapter and limit."""
        if not requests:
            return []
        if len(requests) > self.max_batch:
            raise ValueError(f"requests must be at most {self.max_batch}, got {len(requests)}")
        return [answer for group in self._groups(requests) for answer in self._run(group)]

    def _length(self, request: Request) -> int:
        return len(self.tokenizer(request.prompt)["input_ids"])

    def _groups(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Neighbours that fit the model's positions together.

        All rows of a batch run on until the last is done, so a long prompt beside a long answer
        would reach positions that neither needs.
        """
        groups: list[list[Request]] = []
        prompt = answer = 0
        for request in requests:
            prompt, answer = max(prompt, self._length(request)), max(answer, request.max_new_tokens)
            if not groups or (self._room is not None and prompt + answer > self._room):
                groups.append([])
                prompt, answer = self._length(request), request.max_new_tokens
            groups[-1].append(request)
        return groups

    def _run(self, requests: Sequence[Request]) -> list[Completion]:
        inputs = self.tokenizer([r.prompt for r in requests], return_tensors="pt", padding=True)
        ids = inputs["input_ids"].to(self.model.device)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=inputs["attention_mask"].to(self.model.device),
            adapter_names=[request.adapter for request in requests],
            do_sample=False,
            num_beams=1,
            max_new_tokens=max(request.max_new_tokens for request in requests),
            pad_token_id=self.tokenizer.pad_token_id,
        )
        rows = out[:, ids.shape[1] :].tolist()
        return [self._complete(row, request) for row, request in zip(rows, requests, strict=True)]

    def _complete(self, row: list[int], request: Request) -> Completion:
        row = row[: request.max_new_tokens]
        end = next((i for i, token in enumerate(row) if token in self._ends), None)
        tokens = tuple(row if end is None else row[: end + 1])
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(text, tokens, "length" if end is None else "stop")


def load_model(
    folder: str | os.PathLike[str], *, dtype: torch.dtype | None, device: torch.device
) -> tuple[Any, Any]:
    """Load model and tokenizer from a folder on this machine, never from the network.

    Args:
        dtype: the dtype to load in; as in the checkpoint if None.

    Raises:
        ImportError: transformers is not installed.
        FileNotFoundError: the folder does not exist or has no ``config.json``.
    """
    transformers = import_transformers()
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is not a model folder: it has no config.json")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype="auto" if dtype is None else dtype, local_files_only=True
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    return model.to(device).eval(), tokenizer
