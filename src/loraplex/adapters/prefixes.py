"""One renaming of a name's beginning that makes an adapter's names fit a model's names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

# Parts that only say how a model is wrapped. "encoder" or "vision_model" say which model it is,
# so a renaming never adds, drops or changes them.
WRAPPER_PARTS = frozenset(
    ("backbone", "base_model", "language_model", "llm", "model", "module", "text_model",
     "thinker", "transformer")
)  # fmt: skip

Renaming = tuple[str, str]  # (prefix in the adapter, prefix in the model), each "" or "x.y."


def find_renamings(names: Collection[str], known: Collection[str]) -> list[Renaming]:
    """The renamings that fit most of `names`, the shortest change first; more than one is a tie.

    Example:
        >>> find_renamings(["language_model.model.layers.0.q"], ["model.layers.0.q"])
        [('language_model.', '')]
    """
    prefixes: dict[str, list[str]] = {}
    for name in known:
        for prefix, suffix in _splits(name):
            prefixes.setdefault(suffix, []).append(prefix)
    votes: Counter[Renaming] = Counter()
    for name in names:
        pairs = {
            _shortest(prefix, other)
            for prefix, suffix in _splits(name)
            for other in prefixes.get(suffix, ())
            if prefix != other
        }
        votes.update(pairs)
    if not votes:
        return []
    most = max(votes.values())
    best = [pair for pair, count in votes.items() if count == most]
    size = min(_parts_changed(pair) for pair in best)
    return sorted(pair for pair in best if _parts_changed(pair) == size)


def rename(name: str, renaming: Renaming) -> str:
    """`name` with its beginning exchanged, or as it was when it begins otherwise."""
    old, new = renaming
    return new + name[len(old) :] if name.startswith(old) else name


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """(prefix, suffix) pairs whose prefix has only wrapper parts, the empty prefix first."""
    start = 0
    yield "", name
    while True:
        end = name.find(".", start)
        if end < 0 or name[start:end] not in WRAPPER_PARTS:
            return
        start = end + 1
        yield name[:start], name[start:]


def _shortest(old: str, new: str) -> Renaming:
    """The same renaming without the parts that both prefixes end with."""
    before, after = old.split(".")[:-1], new.split(".")[:-1]
    while before and after and before[-1] == after[-1]:
        before, after = before[:-1], after[:-1]
    return ("".join(f"{p}." for p in before), "".join(f"{p}." for p in after))


def _parts_changed(pair: Renaming) -> int:
    return pair[0].count(".") + pair[1].count(".")
