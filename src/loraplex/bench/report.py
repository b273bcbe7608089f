"""A suite as one HTML file that needs nothing else: tables, pictures, and what the words mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

Content = Mapping[str, Any]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 72rem; margin: 2rem auto;
       padding: 0 1.2rem; }
h1 { font-size: 1.7rem; } h2 { margin-top: 2.4rem; font-size: 1.25rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; font-size: .88rem; display: block;
        overflow-x: auto; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #e5e7eb;
         white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
th { color: #6b7280; font-weight: 600; }
tr.sum td { font-weight: 700; border-top: 2px solid #9aa5b1; }
td.bad { color: #b4436c; } small, .muted { color: #6b7280; }
.warning { background: #fff4d6; padding: .8rem 1rem; border-left: 4px solid #f2b134; }
code { background: #f3f4f6; padding: .1rem .3rem; } svg { max-width: 100%; height: auto; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 1.2rem; }
@media (prefers-color-scheme: dark) { body { background: #fff; } }
"""

WORDS = (
    ("base", "The layers without any LoRA: one matrix product each, by torch (cuBLAS)."),
    ("tax", "Time over that of base, same run. 1.00 means that LoRA costs nothing."),
    (
        "byte floor",
        "What cannot be undercut: the bytes that must move once (weight, the adapters that occur, "
        "inputs, outputs) over the memory bandwidth, or the multiplications over the matrix rate, "
        "whichever takes longer. Both rates are measured in the same run.",
    ),
    ("× floor", "Time over the byte floor: how far from the best that this GPU could do."),
    ("share", "The byte floor over the time: 100 % would be that best."),
    (
        "merged",
        "One adapter added into the weights. It has no LoRA work left, but serves one adapter "
        "only; with many adapters it would need as many copies of the model.",
    ),
    ("block", "The sum over the linear layers of one decoder block of the model."),
    (
        "no time",
        "Results are compared with float64 before and after the timing. What is wrong, or fails, "
        "gets no time; the reasons are at the end.",
    ),
)


def write_report(path: Path, content: Content, pictures: Mapping[str, str]) -> None:
    """Write the page.

    Args:
        content: what the suite's JSON file holds.
        pictures: SVG elements by name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(make_page(content, pictures), encoding="utf-8")


def make_page(content: Content, pictures: Mapping[str, str]) -> str:
    """The page as text."""
    model, header = content["model"], content["header"]
    title = f"LoRA layers of {model['name']} on {header['device']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        *_opening(content),
        *_whole_block(content, pictures),
        "<h2>Layer by layer</h2>",
        *(part for case in content["cases"] for part in _case(content, case)),
        *_curves(content, pictures),
        *_reasons(content),
        "<h2>What the words mean</h2>",
        f"<dl>{''.join(f'<dt>{escape(w)}</dt><dd>{escape(t)}</dd>' for w, t in WORDS)}</dl>",
        "<h2>Who was measured</h2>",
        _table(["provider", "what it is"], [[n, a] for n, a in content["providers"].items()]),
        "<h2>On what</h2>",
        _table(["", ""], [[key, str(value)] for key, value in header.items()]),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _opening(content: Content) -> list[str]:
    model, ceilings = content["model"], content["ceilings"]
    layers = ", ".join(
        f"{layer['name']} ({layer['k']} → {' + '.join(map(str, layer['slices']))})"
        for layer in model["layers"]
    )
    parts = [
        "<p>One base model, many LoRA adapters, each token with its own: what does that cost over "
        f"the base model alone? Measured here on the linear layers of {escape(model['name'])}, "
        f"{model['blocks']} blocks of {escape(layers)}, in {escape(content['dtype'])}, by replay "
        "of CUDA graphs, medians, with weights that come from memory.</p>"
    ]
    if content["is_rehearsal"]:
        parts = [
            '<p class="warning">A rehearsal without a GPU: tiny layers, and kernels in an '
            "interpreter. It shows that results are right and what this report looks like. "
            "Its times mean nothing.</p>"
        ]
    if ceilings:
        parts.append(
            f"<p>Ceilings of this GPU, measured in the same run: "
            f"{ceilings['bytes_per_second'] / 1e12:.2f} TB/s, "
            f"{ceilings['flops_per_second'] / 1e12:.0f} TFLOP/s.</p>"
        )
    return parts


def _whole_block(content: Content, pictures: Mapping[str, str]) -> list[str]:
    if content["is_rehearsal"] or not content["cases"]:
        return []
    return [
        "<h2>A whole block</h2>",
        "<p>Tax of each provider: its time over that of the base layers without LoRA.</p>",
        _tax_table(content),
        *_pictures(pictures, ("tax", "share")),
    ]


def _tax_table(content: Content) -> str:
    names = [name for name in content["providers"] if name != "base"]
    blocks, rows = content["model"]["blocks"], []
    for case in content["cases"]:
        own = _rows_of(content, case["name"], "block")
        base = own["base"]["ms"]
        ms = f"{base['median'] * blocks:.3g}" if base else "no time"
        rows.append([case["name"], ms, *(_number(own[name]["tax"], "{:.2f}") for name in names)])
    return _table(["", f"base, ms for {blocks} blocks", *names], rows)


def _case(content: Content, case: Content) -> list[str]:
    names = list(content["providers"])
    layers = [*(layer["name"] for layer in content["model"]["layers"]), "block"]
    rows = []
    for layer in layers:
        own = _rows_of(content, case["name"], layer)
        ours = own["lora_linear"]
        cells = [layer, _us(ours["floor_ms"])]
        for name in names:
            row = own[name]
            cell = _us(row["ms"] and row["ms"]["median"])
            if content["is_rehearsal"]:
                cell = "right" if row["ms"] else "no time"
            elif row["tax"] is not None and name != "base":
                cell += f" ({row['tax']:.2f})"
            cells.append(cell)
        shares = (_number(ours["multiple"], "{:.2f}"), _number(ours["share"], "{:.0%}"))
        rows.append([*cells, *shares])
    heads = ["µs (tax)", "byte floor", *names, "lora_linear × floor", "share"]
    return [f"<h3>{escape(case['name'])}</h3>", _table(heads, rows, sums=[len(rows) - 1])]


def _curves(content: Content, pictures: Mapping[str, str]) -> list[str]:
    if content["is_rehearsal"] or not content["curves"]:
        return []
    parts = ["<h2>Curves</h2>", "<p>Microseconds for the layers of a block.</p>"]
    for curve in content["curves"]:
        parts.append(f"<h3>{escape(curve['about'])}</h3>")
        parts += _pictures(pictures, (f"curve_{curve['name']}",))
        rows = [
            [
                str(point["x"]),
                _number(point["floor_us"], "{:.1f}"),
                *(_number(point["us"].get(name), "{:.1f}") for name in curve["providers"]),
            ]
            for point in curve["points"]
        ]
        parts.append(_table([curve["name"], "byte floor", *curve["providers"]], rows))
    return parts


def _reasons(content: Content) -> list[str]:
    rows = [
        [row["case"], row["layer"], row["provider"], row["why"]]
        for row in content["rows"]
        if row["why"] and row["layer"] != "block"
    ]
    if not rows:
        return ["<p>Every result was right.</p>"]
    return ["<h2>Without a time</h2>", _table(["case", "layer", "provider", "why"], rows)]


def _rows_of(content: Content, case: str, layer: str) -> dict[str, Content]:
    rows = content["rows"]
    return {r["provider"]: r for r in rows if r["case"] == case and r["layer"] == layer}


def _pictures(pictures: Mapping[str, str], names: Iterable[str]) -> list[str]:
    return [f"<figure>{pictures[name]}</figure>" for name in names if name in pictures]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], sums: Sequence[int] = ()) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(
            f'<td class="bad">{escape(text)}</td>'
            if text == "no time"
            else f"<td>{escape(text)}</td>"
            for text in row
        )
        lines.append(f'<tr class="sum">{cells}</tr>' if number in sums else f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _us(ms: float | None) -> str:
    return "no time" if ms is None else f"{1e3 * ms:.1f}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
