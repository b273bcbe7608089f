"""Patterns of strangers match what ``re`` says, in bounded time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.name_regex import UnsupportedPatternError, compile_name_regex
from loraplex.adapters.patterns import PatternTable

ATOMS = st.sampled_from(
    ["a", "b", "ab", ".", r"\.", r"\d", r"\W", "[ab]", "[^a]", "[]a]", r"[\]a-c]", "^", "$", "{",
     "_0", "(?=a)", "(?!b)", "{}", "a{", "q{,x}"]
)  # fmt: skip
QUANTIFIERS = st.sampled_from(
    [""] * 5 + ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{2,}", "{,}", "{0}"]
)


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    quantified = st.tuples(parts, QUANTIFIERS).map("".join)
    return st.lists(quantified, max_size=3).map("".join)


def grouped(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    branches = st.lists(joined(inner), min_size=1, max_size=2).map("|".join)
    return st.tuples(st.sampled_from(["(", "(?:", "(?=", "(?!"]), branches).map(
        lambda pair: f"{pair[0]}{pair[1]})"
    )


PATTERNS = joined(ATOMS | grouped(ATOMS | grouped(ATOMS)))


@settings(max_examples=1500)
@given(PATTERNS, st.lists(st.text(alphabet="aab.0_q]{", max_size=5), min_size=1, max_size=5))
def test_it_says_what_re_says(pattern: str, names: list[str]) -> None:
    try:
        expression = re.compile(pattern)
    except re.error:
        return
    is_match = compile_name_regex(pattern)
    for name in names:
        assert is_match(name) == bool(expression.match(name)), name


@pytest.mark.parametrize(
    "pattern",
    [r"(?<=a)b", r"(?<!a)b", r"(a)\1", r"(?P<x>a)(?P=x)", r"(?i:a)", r"a\b", r"\Aa", r"\x61",
     "(" * 60 + "a" + ")" * 60],
)  # fmt: skip
def test_what_is_not_carried_is_refused_by_name(pattern: str) -> None:
    re.compile(pattern)
    with pytest.raises(UnsupportedPatternError, match=r"it has|it nests"):
        compile_name_regex(pattern)
    if "(" in pattern:
        with pytest.raises(UnsupportedPatternError, match="the pattern .* list the modules' names"):
            PatternTable({pattern: 1})


@pytest.mark.parametrize(
    "pattern",
    [r"(a+)+$", r"((a|a)+)+b", r"(.*)*x", r".*.*.*.*.*.*.*x", "(a|a)" * 50 + "b", "a?" * 99 + "b",
     "((((a*)*b?)*c?)*d?)*e", "(((a{1000}){1000}){1000})*b", "(?=(.*)*x)" * 30],
)  # fmt: skip
@pytest.mark.parametrize("size", [60, 1000])
def test_no_pattern_takes_long(pattern: str, size: int) -> None:
    start = time.perf_counter()
    is_match = compile_name_regex(rf"(.*\.)?({pattern})$")
    assert is_match("a" * size) == (pattern == "(a+)+$")
    assert time.perf_counter() - start < 5


def test_a_pattern_that_would_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.adapters.name_regex.MAX_STEPS", 500)
    pattern = "((a?){100}){100}b"
    table = PatternTable({pattern: 1})
    assert table.find("xb", 2) == 2
    with pytest.raises(UnsupportedPatternError, match="it takes too long to match"):
        table.find("a" * 999, 2)
