r"""Regular expressions over module names, in time that no expression can make grow without end.

A pattern of an adapter's config comes from a stranger, and ``re`` backtracks: ``(a+)+$`` on a name
of forty letters keeps a process busy for hours, with the interpreter's lock held. What PEFT asks of
a pattern is only whether it matches, so no groups and no longest match are needed, and the set of
positions that a part can end at says it all. A set of positions is an integer with one bit each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from loraplex.errors import UnsupportedAdapterError

MAX_STEPS = 20_000  # a usual pattern takes less than a hundred
MAX_GROUPS = 50  # inside one another

_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(?:(,)(\d*))?\}")
# Letters that stand for themselves; the last one before a quantifier belongs to that.
_WORD = re.compile(r"\w+(?![*+?{\w])")
_CHAR_ESCAPES = frozenset("dDwWsSafnrtv")  # each for one character


class UnsupportedPatternError(UnsupportedAdapterError):
    """A regular expression that ``re`` knows and this module does not match."""


@dataclass
class _Text:
    """One name: where it has which words, and how many steps were spent on it."""

    text: str
    words: dict[str, int] = field(default_factory=dict)
    steps: int = 0

    def places(self, word: str) -> int:
        """Positions at which a word begins."""
        found = self.words.get(word)
        if found is None:
            found, position = 0, self.text.find(word)
            while position >= 0:
                found |= 1 << position
                position = self.text.find(word, position + 1)
            self.words[word] = found
        return found

    def spend(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise UnsupportedPatternError("it takes too long to match")


Ends = Callable[[_Text, int], int]  # positions a part may start at → those it may end at


def compile_name_regex(pattern: str) -> Callable[[str], bool]:
    r"""Whether ``re.match(pattern, name)`` finds something, as a function of the name.

    Args:
        pattern: literals, classes, groups, alternatives, repetitions, ``^``, ``$`` and looking
            ahead; looking behind, references to groups, flags, atomic groups and possessive
            repetitions are not carried.

    Raises:
        re.error, OverflowError, RecursionError: not a regular expression.
        UnsupportedPatternError: one that is not carried. The function raises it too, for a pattern
            that would take too long on that name.

    Example:
        >>> is_match = compile_name_regex(r"(.*\.)?(layers\.(0|2)\..*_proj)$")
        >>> is_match("model.layers.2.mlp.up_proj"), is_match("model.layers.1.mlp.up_proj")
        (True, False)
    """
    re.compile(pattern)
    parser = _Parser(pattern)
    ends = parser.alternatives()
    if parser.position < len(pattern):
        raise UnsupportedPatternError("its groups do not nest")

    def is_match(name: str) -> bool:
        return bool(ends(_Text(name), 1))

    return is_match


class _Parser:
    """Parses a pattern that ``re`` has accepted, so only what it may mean is asked here."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.position = 0
        self.depth = 0

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.position)

    def take(self, text: str) -> bool:
        found = self.peek(text)
        self.position += len(text) if found else 0
        return found

    def alternatives(self) -> Ends:
        branches = [self.sequence()]
        while self.take("|"):
            branches.append(self.sequence())
        return branches[0] if len(branches) == 1 else _either(branches)

    def sequence(self) -> Ends:
        return _in_turn(list(self.parts()))

    def parts(self) -> Iterator[Ends]:
        while self.position < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            word = _WORD.match(self.pattern, self.position)
            if word is None:
                yield self.quantified(*self.part())
            else:
                self.position = word.end()
                yield _word(word.group())

    def quantified(self, part: Ends, chars: re.Pattern[str] | None) -> Ends:
        found = _QUANTIFIER.match(self.pattern, self.position)
        if found is None or found.group() == "{}":
            return part
        self.position = found.end()
        if self.take("+"):
            raise UnsupportedPatternError("it has a possessive repetition")
        self.take("?")  # lazy or greedy, it matches the same names
        least, most = _bounds(found)
        if chars is not None and most is None:
            return _in_turn([_times(part, least, least), _run(chars)])
        return _times(part, least, most)

    def part(self) -> tuple[Ends, re.Pattern[str] | None]:
        """One part, and its class where it is a single character."""
        start, char = self.position, self.pattern[self.position]
        self.position += 1
        if char == "(":
            return self.group(), None
        if char == "^":
            return (lambda text, starts: starts & 1), None
        if char == "$":
            return (lambda text, starts: starts & 1 << len(text.text)), None
        if char == "[":
            self.skip_class()
        elif char == "\\":
            escaped = self.pattern[self.position]
            self.position += 1
            if escaped.isalnum() and escaped not in _CHAR_ESCAPES:
                raise UnsupportedPatternError(f"it has \\{escaped}")
        elif char == "{":  # no quantifier, so itself
            chars = re.compile(r"\{")
            return _single(chars), chars
        chars = re.compile(self.pattern[start : self.position])
        return _single(chars), chars

    def skip_class(self) -> None:
        self.take("^")
        self.take("]")  # in the first place it is one of the characters
        while not self.take("]"):
            self.position += 2 if self.peek("\\") else 1

    def group(self) -> Ends:
        self.depth += 1
        if self.depth > MAX_GROUPS:
            raise UnsupportedPatternError(f"it nests more than {MAX_GROUPS} groups")
        is_ahead = self.take("?=")
        is_not_ahead = not is_ahead and self.take("?!")
        if not (is_ahead or is_not_ahead or self.take("?:")) and self.peek("?"):
            raise UnsupportedPatternError(f"it has ({self.pattern[self.position :][:3]}...")
        inner = self.alternatives()
        self.take(")")
        self.depth -= 1
        return _ahead(inner, is_ahead) if is_ahead or is_not_ahead else inner


def _bounds(found: re.Match[str]) -> tuple[int, int | None]:
    """Least and most of a quantifier; None is no limit."""
    if found.group() in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[found.group()]
    low, comma, high = found.groups()
    least = int(low or 0)
    if comma is None:
        return least, least
    return least, int(high) if high else None


def _places(text: _Text, chars: re.Pattern[str]) -> int:
    """Positions whose character is of a class."""
    text.spend()
    mask = 0
    for char in set(text.text):
        if chars.match(char):
            mask |= text.places(char)
    return mask


def _word(word: str) -> Ends:
    return lambda text, starts: (starts & text.places(word)) << len(word)


def _single(chars: re.Pattern[str]) -> Ends:
    return lambda text, starts: (starts & _places(text, chars)) << 1


def _run(chars: re.Pattern[str]) -> Ends:
    """Any number of characters of a class, in one addition: it carries to the end of each run."""

    def ends(text: _Text, starts: int) -> int:
        mask = _places(text, chars)
        return starts | (((starts & mask) + mask) ^ mask)

    return ends


def _in_turn(parts: list[Ends]) -> Ends:
    def ends(text: _Text, starts: int) -> int:
        for part in parts:
            if not starts:
                return 0
            text.spend()
            starts = part(text, starts)
        return starts

    return ends


def _either(branches: list[Ends]) -> Ends:
    def ends(text: _Text, starts: int) -> int:
        found = 0
        for branch in branches:
            text.spend()
            found |= branch(text, starts)
        return found

    return ends


def _times(part: Ends, least: int, most: int | None) -> Ends:
    def ends(text: _Text, starts: int) -> int:
        for _ in range(least):
            text.spend()
            after = part(text, starts)
            if after == starts:  # so it stays however often
                break
            starts = after
        found = fresh = starts
        count = least
        while fresh and (most is None or count < most):
            text.spend()
            fresh = part(text, fresh) & ~found
            found |= fresh
            count += 1
        return found

    return ends


def _ahead(inner: Ends, is_wanted: bool) -> Ends:
    def ends(text: _Text, starts: int) -> int:
        found = 0
        for position in range(starts.bit_length()):
            start = starts & 1 << position
            if start and bool(inner(text, start)) == is_wanted:
                found |= start
        return found

    return ends
