"""Pictures of a suite: the tax of every case, the share of the floor by layer, the curves."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1b1f24", "#6b7280", "#e5e7eb"
COLORS = {
    "base": "#9aa5b1", "matmul": "#5b8def", "merged": "#c3cad3", "lora_linear": "#0f9d8a",
    "gemm_add": "#f2b134", "serial": "#b4436c", "vllm": "#7a5195", "sglang_csgmv": "#e8743b",
}  # fmt: skip
# A bar beyond this is cut and labelled; serial torch at 64 adapters would flatten all others.
MOST_TAX = 2.5

Content = Mapping[str, Any]


def draw(content: Content) -> dict[str, Figure]:
    """Figures by name, from the content of a suite's JSON file; none without times.

    Raises:
        ImportError: matplotlib is not installed (extra ``bench``).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'loraplex[bench]'") from error
    if content["is_rehearsal"]:
        return {}
    found: dict[str, Figure] = {}
    blocks = [row for row in content["rows"] if row["layer"] == "block"]
    found["tax"] = _bars(
        Figure(figsize=(10, 1.4 + 0.62 * len(content["cases"])), dpi=110),
        [case["name"] for case in content["cases"]],
        {(row["case"], row["provider"]): row["tax"] for row in blocks},
        [name for name in content["providers"] if name not in ("base", "merged")],
        "LoRA tax of a whole block: time over the base GEMMs alone (1 = free)",
        line=1.0,
    )
    ours = [row for row in content["rows"] if row["provider"] == "lora_linear"]
    layers = list(dict.fromkeys(row["layer"] for row in ours))
    found["share"] = _bars(
        Figure(figsize=(10, 1.4 + 0.5 * len(content["cases"])), dpi=110),
        [case["name"] for case in content["cases"]],
        {(row["case"], row["layer"]): row["share"] for row in ours},
        layers,
        "lora_linear's share of the byte floor, by layer (1 = nothing can be faster)",
        line=1.0,
    )
    for curve in content["curves"]:
        found[f"curve_{curve['name']}"] = _curve(Figure(figsize=(8, 4.2), dpi=110), curve)
    return found


def as_svg(figure: Figure) -> str:
    """A figure as an element to put into a page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def save(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write each as a PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path, bbox_inches="tight", facecolor="white")
    return paths


def _bars(
    figure: Figure,
    cases: Sequence[str],
    values: Mapping[tuple[str, str], float | None],
    names: Sequence[str],
    title: str,
    line: float,
) -> Figure:
    axes = figure.add_subplot()
    height = 0.82 / max(1, len(names))
    palette = list(COLORS.values())
    for number, name in enumerate(names):
        color = COLORS.get(name, palette[(number + 1) % len(palette)])
        for place, case in enumerate(cases):
            value = values.get((case, name))
            y = place - 0.41 + height * (number + 0.5)
            label = name if place == 0 else None
            if value is None:
                axes.barh(y, 0, height=height, color=color, label=label)
                axes.text(0.01, y, "no time", va="center", fontsize=6, color=MUTED)
                continue
            axes.barh(y, min(value, MOST_TAX), height=height, color=color, label=label, zorder=2)
            axes.text(
                min(value, MOST_TAX) + 0.01, y, f"{value:.2f}", va="center", fontsize=6.5, color=INK
            )  # fmt: skip
    axes.axvline(line, color=INK, lw=1, ls=(0, (4, 3)), zorder=3)
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.legend(fontsize=7.5, frameon=False, ncols=6, loc="upper left", bbox_to_anchor=(0, -0.04))
    _dress(axes)
    axes.grid(axis="x", color=GRID, lw=0.8, zorder=0)
    return figure


def _curve(figure: Figure, curve: Content) -> Figure:
    axes = figure.add_subplot()
    for name in curve["providers"]:
        points = [(p["x"], p["us"].get(name)) for p in curve["points"]]
        shown = [(x, us) for x, us in points if us is not None]
        color = COLORS.get(name, INK)
        axes.plot([x for x, _ in shown], [us for _, us in shown], "o-", color=color, label=name)
    floors = [(p["x"], p["floor_us"]) for p in curve["points"] if p["floor_us"] is not None]
    axes.plot([x for x, _ in floors], [us for _, us in floors], ":", color=INK, label="byte floor")
    xs = [p["x"] for p in curve["points"]]
    axes.set_xscale("log", base=2)
    axes.set_xticks(xs, [str(x) for x in xs])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(curve["about"], fontsize=9)
    axes.set_ylabel("microseconds for a block's layers", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    axes.grid(color=GRID, lw=0.8)
    _dress(axes)
    return figure


def _dress(axes: Any) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
