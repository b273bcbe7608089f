"""The same requests through the PEFT library, one adapter at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Row = tuple[str, str | None]  # prompt, adapter


def generate_one_adapter_at_a_time(
    model: Any, tokenizer: Any, adapters: Mapping[str, Path], rows: Sequence[Row], *, limit: int
) -> Iterator[tuple[str | None, dict[int, list[int]]]]:
    """Answer ``rows`` with PEFT, all rows of one adapter together, and yield after each adapter.

    Args:
        model: the base model, not attached; PEFT's layers are put into it.
        limit: max_new_tokens.

    Yields:
        the adapter, and the new tokens of its rows by row number, end token included.

    Raises:
        ImportError: peft is not installed.
    """
    from peft import PeftModel

    wanted = list(dict.fromkeys(adapter for _, adapter in rows))
    # The base rows come first, while the model has no adapters at all.
    for adapter in sorted(wanted, key=lambda name: name is not None):
        if adapter is not None:
            model = PeftModel.from_pretrained(model, str(adapters[adapter]), adapter_name=adapter)
            model.eval()
        numbers = [number for number, row in enumerate(rows) if row[1] == adapter]
        answers = greedy(model, tokenizer, [rows[number][0] for number in numbers], limit=limit)
        yield adapter, dict(zip(numbers, answers, strict=True))
        if adapter is not None:
            model = model.unload()


def greedy(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, limit: int, **options: Any
) -> list[list[int]]:
    """The new tokens of each prompt, decoded greedily in one left-padded batch."""
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True).to(model.device)
    with torch.no_grad():
        out = model.generate(**inputs, do_sample=False, max_new_tokens=limit, **options)
    return [
        trim(row, tokenizer.eos_token_id) for row in out[:, inputs["input_ids"].shape[1] :].tolist()
    ]


def trim(tokens: Sequence[int], end: int) -> list[int]:
    """The tokens up to and with the first end token; what follows it is padding.

    Example:
        >>> trim([5, 6, 2, 0, 0], end=2)
        [5, 6, 2]
    """
    tokens = list(tokens)
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The position of the first token that differs, None if there is none.

    Example:
        >>> first_difference([1, 2, 3], [1, 2]), first_difference([1, 2], [1, 2])
        (2, None)
    """
    if list(ours) == list(theirs):
        return None
    same = [a == b for a, b in zip(ours, theirs, strict=False)]
    return same.index(False) if False in same else len(same)
