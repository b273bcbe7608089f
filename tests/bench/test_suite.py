"""``loraplex bench suite``: providers, sums, pictures and the report."""

from __future__ import annotations

import html.parser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.bench import suite_peers
from loraplex.bench.ceilings import Ceilings
from loraplex.bench.layers import TINY, Layer, ModelLayers
from loraplex.bench.layers_batch import Batch, Tensors, answers, make_sets
from loraplex.bench.report import make_page, write_report
from loraplex.bench.suite import (
    BLOCK,
    CASES,
    CURVES,
    TINY_CASES,
    Case,
    Row,
    block_rows,
    run_case,
    with_ratios,
)
from loraplex.bench.suite_providers import Provider, merged_answer, providers
from loraplex.bench.timing import Timing
from loraplex.cli.suite import as_content, as_curve, print_reasons

CPU = torch.device("cpu")
HEADER = {"device": "Some <GPU>", "torch": "2", "commit": "abc", "command": "loraplex bench suite"}
MODEL = ModelLayers("small", 3, TINY.layers[:2])
WAYS = providers(is_gpu=True)


def timing(ms: float) -> Timing:
    return Timing(ms, 0.9 * ms, 1.1 * ms)


def rows_of(case: Case, times: dict[str, float | None]) -> list[Row]:
    """Both layers and their block; None for a provider that was wrong in the second layer."""
    rows: list[Row] = []
    for layer in MODEL.layers:
        own = []
        for name, ms in times.items():
            is_missing = ms is None and layer.name == "o"
            time = None if is_missing else timing(ms or 1.0)
            why = "wrong: WRONG: <1>" if is_missing else ""
            own.append(Row(case.name, layer.name, name, time, floor_ms=0.5, why=why))
        rows += with_ratios(own)
    return [*rows, *block_rows(rows)]


@pytest.fixture
def content() -> dict[str, Any]:
    cases = [CASES[0], CASES[-1]]
    times: dict[str, float | None] = {way.name: 2.0 for way in WAYS}
    rows = rows_of(cases[0], {**times, "lora_linear": 2.5, "merged": 1.9})
    rows += rows_of(cases[1], {**times, "serial": None, "lora_linear": 3.0})
    about, along = CURVES["rank"]
    short = dict.fromkeys(("base", "lora_linear", "gemm_add"), 2.0)
    curve = as_curve("rank", about, [(x, rows_of(case, short)) for x, case in along])
    ceilings = Ceilings(4e12, 8e14)
    return as_content(
        HEADER, MODEL, torch.bfloat16, ceilings, cases, WAYS, rows, [curve]
    )  # fmt: skip


@pytest.mark.parametrize("case", [Case(1, 1, 8), Case(5, 2, 16, is_mixed=True)])
def test_providers_of_torch_are_right(case: Case) -> None:
    layer = Layer("gate_up", 64, (48, 48))
    batch = Batch(layer, case.m, case.adapters, case.rank, torch.float16, case.is_mixed)
    (tensors,) = make_sets(batch, CPU)
    right = {**answers(batch, tensors), "merged": merged_answer(batch, tensors)}
    for name in ("base", "merged", "serial", "lora_linear_torch"):
        (way,) = (way for way in providers(is_gpu=False) if way.name == name)
        verdict = right[way.work].judge(way.prepare(batch, tensors)())
        assert verdict.is_correct, f"{name}: {verdict}"
    if case.m == 1:
        # one token: merged weights give what adapters give
        assert right["whole"].judge(right["merged"].eager).is_correct


@pytest.mark.interpreter
def test_case_on_the_interpreter() -> None:
    told: list[str] = []
    done: list[int] = []
    ways = providers(is_gpu=False)
    rows = run_case(
        TINY_CASES[1], MODEL, torch.float16, CPU, ways, None, (0, 1),
        on_start=told.append, on_done=lambda: done.append(1),
    )  # fmt: skip
    assert all(row.ms is not None for row in rows), [row.why for row in rows]
    assert len(rows) == 3 * len(ways)
    assert len(told) == len(done) == 2 * len(ways)
    assert all(row.floor_ms is None and row.share is None for row in rows)


def test_who_is_wrong_or_fails_has_a_reason_and_no_time() -> None:
    def wrong(batch: Batch, tensors: Tensors) -> Callable[[], torch.Tensor]:
        return lambda: tensors.x @ tensors.weight.T

    def failing(batch: Batch, tensors: Tensors) -> Callable[[], torch.Tensor]:
        raise ModuleNotFoundError("no such peer")

    base = providers(is_gpu=False)[0]
    ways = [base, Provider("wrong", "whole", wrong, ""), Provider("no", "whole", failing, "")]
    ceilings = Ceilings(1e9, 1e12)
    rows = run_case(TINY_CASES[1], MODEL, torch.float16, CPU, ways, ceilings, (0, 1))
    by_name = {(row.layer, row.provider): row for row in rows}
    assert by_name["o", "wrong"].why.startswith("wrong: WRONG")
    assert by_name["o", "no"].why == "failed: ModuleNotFoundError: no such peer"
    assert by_name[BLOCK, "no"].why == "no time for qkv, o"
    for name in ("wrong", "no"):
        row = by_name["qkv", name]
        assert (row.ms, row.tax, row.multiple, row.share) == (None, None, None, None)
    row = by_name["qkv", "base"]
    assert row.ms is not None
    assert row.tax == 1.0
    assert row.floor_ms == ceilings.floor_ms(
        *Batch(MODEL.layers[0], 8, 2, 8, torch.float16).work()["base"]
    )
    assert row.multiple == pytest.approx(row.ms.median / row.floor_ms)
    assert row.share == pytest.approx(1 / row.multiple)


def test_block_is_the_sum_of_its_layers() -> None:
    rows = {row.provider: row for row in rows_of(CASES[0], {"base": 2.0, "ours": 3.0})[-2:]}
    assert rows["ours"].layer == BLOCK
    assert rows["ours"].ms == timing(3.0) + timing(3.0)
    assert rows["ours"].tax == 1.5
    assert rows["ours"].floor_ms == 1.0
    assert rows["ours"].multiple == 6.0


def test_cases_and_curves_are_what_they_say() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.phase for case in CASES} == {"decode", "prefill"}
    assert Case(64, 8, 16, slots=256).name == "64 tokens, 8 adapters of 256 slots, rank 16"
    assert Case(1, 1, 8, max_rank=64).name == "1 token, 1 adapter, rank 8 in a rank-64 pool"
    for _, along in CURVES.values():
        assert [x for x, _ in along] == sorted({x for x, _ in along})
        for _, case in along:
            batch = Batch(
                Layer("o", 64, (64,)), case.m, case.adapters, case.rank, torch.float16,
                slots=case.slots, max_rank=case.max_rank,
            )  # fmt: skip
            assert len(set(batch.indices().tolist())) == case.adapters


class Reader(html.parser.HTMLParser):
    """Collects tags, links and text, and sees whether tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "!doctype"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_report_stands_alone(content: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write_report(path, content, {"tax": "<svg></svg>"})
    page = path.read_text()
    reader = read(page)
    assert [link for link in reader.links if not link.startswith("#")] == []
    text = " ".join(reader.text)
    for words in (
        "Some <GPU>", "1 token, 1 adapter, rank 16", "3 blocks", "byte floor", "2500.0 (1.25)",
        "wrong: WRONG: <1>", "loraplex bench suite", "4.00 TB/s",
        "rank of 8 adapters, 64 tokens", "What the words mean",
    ):  # fmt: skip
        assert words in text, words
    assert "no time" in text
    assert "rehearsal" not in text
    # 3 blocks of 2 layers of 2 ms
    assert "12" in reader.text
    assert page.count("<svg>") == 1


def test_rehearsal_shows_no_times(content: dict[str, Any]) -> None:
    page = make_page({**content, "is_rehearsal": True, "ceilings": None}, {})
    text = " ".join(read(page).text)
    assert "Its times mean nothing" in text
    assert "2500.0" not in text
    assert "right" in text


def test_reasons_decide_the_exit_code(
    content: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    # serial is not ours: it may fail
    assert print_reasons(content, WAYS)
    assert "serial, o, 4096 tokens" in capsys.readouterr().out
    ours = [replace(way, is_ours=True) if way.name == "serial" else way for way in WAYS]
    assert not print_reasons(content, ours)


def test_pictures(content: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from loraplex.bench.report_plot import as_svg, draw, save

    figures = draw(content)
    assert list(figures) == ["tax", "share", "curve_rank"]
    svg = as_svg(figures["tax"])
    assert svg.startswith("<svg")
    assert svg.rstrip().endswith("</svg>")
    for path in save(figures, tmp_path / "pictures"):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert draw({**content, "is_rehearsal": True}) == {}


def test_without_matplotlib_the_error_names_the_extra(
    content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from loraplex.bench.report_plot import draw

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"loraplex\[bench\]"):
        draw(content)


def test_peers_are_those_that_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_peers.importlib.util, "find_spec", lambda name: name == "vllm")
    assert [peer.name for peer in suite_peers.peers()] == ["vllm"]


def test_pools_for_peers() -> None:
    batch = Batch(Layer("gate_up", 16, (8, 8)), 2, 2, 16, torch.float16, is_mixed=True)
    (tensors,) = make_sets(batch, CPU)
    a, b = suite_peers._zero_padded(batch, tensors)
    assert batch.ranks == [8, 16]
    assert not a[0, 8:16].any()
    assert not a[0, 24:].any()
    assert not b[0, :, 8:].any()
    assert torch.equal(a[1], tensors.a_pool[1])
    packed = suite_peers._packed_a(batch, tensors)
    assert torch.equal(packed[0, 8:16], tensors.a_pool[0, 16:24])
    assert not packed[0, 16:].any()
    assert torch.equal(packed[1], tensors.a_pool[1])
