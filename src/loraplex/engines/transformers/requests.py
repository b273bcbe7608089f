"""One request of a file: what to continue, with which adapter, how far."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn


class RequestError(ValueError):
    """A request that cannot be served; the others are. ``id`` is the request's, if it has one."""

    id: Any = None


@dataclass(frozen=True)
class Request:
    """A prompt, the adapter that answers it (None = the base model), and a limit."""

    prompt: str
    adapter: str | None = None
    max_new_tokens: int = 64
    id: Any = None


FIELDS = ("prompt", "adapter", "max_new_tokens", "id")


def parse_request(line: str | bytes, *, max_new_tokens: int = 64) -> Request:
    """Read a request from one line of JSON.

    Args:
        line: an object (UTF-8 if bytes) with ``prompt``, and optionally ``adapter`` (a name or
            null), ``max_new_tokens`` and ``id`` (anything; comes back with the answer).
        max_new_tokens: for a request that does not say.

    Raises:
        RequestError: not such an object; names the field, the rule and the value.

    Example:
        >>> parse_request('{"prompt": "Hello", "adapter": "shout"}', max_new_tokens=8)
        Request(prompt='Hello', adapter='shout', max_new_tokens=8, id=None)
    """
    try:
        fields = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(f"a request must be a JSON object, got {_shown(fields)}")
    try:
        return _check(fields, max_new_tokens)
    except RequestError as error:
        error.id = fields.get("id")
        raise


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check(fields: dict[str, Any], max_new_tokens: int) -> Request:
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise RequestError(f"unknown field {unknown[0]!r}; the fields are {', '.join(FIELDS)}")
    prompt = fields.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise RequestError(f"prompt must be a string that is not empty, got {_shown(prompt)}")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise RequestError("prompt has half of a surrogate pair, which is no text") from None
    adapter = fields.get("adapter")
    if adapter is not None and not isinstance(adapter, str):
        raise RequestError(f"adapter must be a name or null, got {_shown(adapter)}")
    limit = fields.get("max_new_tokens", max_new_tokens)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise RequestError(f"max_new_tokens must be a whole number from 1, got {_shown(limit)}")
    return Request(prompt, adapter, limit, fields.get("id"))


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
