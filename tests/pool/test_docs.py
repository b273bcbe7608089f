"""The examples of docs/pool.md run, and its numbers are those of the code."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from loraplex.bench.pool import LLAMA_8B
from loraplex.pool.device import COPY_GROUPS
from loraplex.pool.host import LARGEST_SEGMENT
from loraplex.pool.layout import choose_page_bytes, lay_out, matrix_sizes

DOCS = Path(__file__).resolve().parents[2] / "docs" / "pool.md"


def test_examples_of_the_page() -> None:
    text = DOCS.read_text()
    example = doctest.DocTestParser().get_doctest(text, {}, DOCS.name, str(DOCS), 0)
    assert len(example.examples) > 15
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.DocTestRunner(optionflags=options).run(example)
    assert failed == 0


def test_numbers_of_the_page() -> None:
    text = DOCS.read_text()
    shapes = LLAMA_8B.shapes()
    page_bytes = choose_page_bytes(shapes, 2, (8, 16, 32, 64))
    assert f"For Llama-3-8B that is {page_bytes >> 20} MiB" in text
    sizes = {rank: matrix_sizes(shapes.values(), rank, 2) for rank in (8, 16, 64)}
    waste = {rank: lay_out(s, page_bytes).num_bytes / sum(s) - 1 for rank, s in sizes.items()}
    assert waste[8] == 0
    flat = re.sub(r"\s+", " ", text)
    assert (
        f"waste nothing, rank 16 {waste[16]:.1%}, rank 64 {waste[64]:.1%}".replace("%", " %")
        in flat
    )
    assert {8: "eight groups"}[COPY_GROUPS] in text
    assert f"segments of up to {LARGEST_SEGMENT >> 20} MiB" in text
