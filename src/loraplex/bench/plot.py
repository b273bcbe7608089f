"""The ladder as a picture: a bar per way to compute the layer, against the machine's floor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.bench.steps import Ladder, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#1b1f24", "#6b7280", "#e5e7eb"
PARTS = {"base": "#9aa5b1", "shrink": "#f2b134", "expand": "#e8743b", "add": "#b4436c"}
PART_NAMES = {"base": "X·C", "shrink": "X·A", "expand": "Y·B", "add": "W+Z"}
WHOLE, OURS, BASE = "#5b6b7d", "#0f9d8a", "#c3cad3"
BARS = (
    ("base", "X·C alone, torch\n(no LoRA)", BASE),
    ("matmul", "X·C alone, Triton\n(no LoRA)", BASE),
    ("sum", "one by one, torch", ""),
    ("serial", "one expression, torch", WHOLE),
    ("fused", "X·A, then\nfused_matmul_expand", OURS),
    ("lora_linear_torch", "lora_linear, torch", OURS),
    ("lora_linear", "lora_linear", OURS),
)


def save_plot(ladder: Ladder, header: Mapping[str, str], path: Path) -> None:
    """Draw the ladder into a file; the suffix chooses the format (png, svg, pdf).

    Raises:
        ImportError: matplotlib is not installed (extra ``bench``).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'loraplex[bench]'") from error

    figure = Figure(figsize=(9.6, 5.6), dpi=160, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.205, 0.13, 0.765, 0.69))
    rows = {row.key: row for row in ladder.rows}
    _draw_bars(axes, rows)
    if rows["serial"].floor_ms is not None:
        _draw_floor(axes, rows["serial"].floor_ms)
    _dress(axes, rows)

    shape = ladder.shape
    dtype = str(shape.dtype).removeprefix("torch.")
    timed = "CUDA-graph replay" if rows["serial"].graph else "one call at a time"
    title = f"One LoRA layer: X [{shape.m}, {shape.k}] → [{shape.m}, {shape.n}], rank {shape.r}"
    figure.text(0.03, 0.935, title, fontsize=15, fontweight="bold", color=INK)
    subtitle = f"{ladder.device} · {dtype} · {timed}, median with p20 to p80"
    if not ladder.is_gpu:
        subtitle += "\nNo GPU: kernels ran in Triton's interpreter, which times nothing of use"
    figure.text(0.03, 0.915, subtitle, fontsize=10, color=MUTED, va="top")
    versions = f"torch {header['torch']} · triton {header['triton']} · commit {header['commit']}"
    figure.text(0.03, 0.025, f"{versions} · {header['date']}", fontsize=7.5, color=MUTED)
    figure.savefig(path)


def _bars(rows: Mapping[str, Row]) -> list[tuple[str, str, str]]:
    return [bar for bar in BARS if bar[0] in rows]


def _longest(rows: Mapping[str, Row]) -> float:
    shown = [row.best for row in rows.values() if not row.is_interpreted]
    return max(timing.p80 for timing in shown if timing is not None)


def _draw_bars(axes: Axes, rows: Mapping[str, Row]) -> None:
    longest = _longest(rows)
    for place, (key, _, color) in enumerate(_bars(rows)):
        timing = rows[key].best
        if timing is None:
            axes.text(0, place, "  wrong result, no time", va="center", color=PARTS["add"])
            continue
        if rows[key].is_interpreted:
            axes.text(0, place, "  right in the interpreter", va="center", color=MUTED)
            continue
        if color:
            axes.barh(place, timing.median, height=0.62, color=color, zorder=2)
            spread = [[timing.median - timing.p20], [timing.p80 - timing.median]]
            axes.errorbar(timing.median, place, xerr=spread, color=INK, lw=1, capsize=2.5, zorder=3)
        else:
            _draw_parts(axes, rows, place, longest)
        label = f"{timing.median:.4g} ms"
        base = rows["base"].best
        if base is not None and key != "base":
            label += f"   {timing.median / base.median:.2f}×"
        axes.text(
            max(timing.median, timing.p80) + longest * 0.015,
            place,
            label,
            va="center",
            fontsize=10,
            color=INK,
            fontweight="bold" if color == OURS else "normal",
        )


def _draw_parts(axes: Axes, rows: Mapping[str, Row], place: int, longest: float) -> None:
    left = 0.0
    for key, color in PARTS.items():
        timing = rows[key].best
        if timing is None:
            continue
        width = timing.median
        axes.barh(place, width, left=left, height=0.62, color=color, zorder=2, edgecolor="white")
        if width > longest * 0.06:
            axes.text(
                left + width / 2,
                place,
                PART_NAMES[key],
                ha="center",
                va="center",
                fontsize=8.5,
                color="white",
                zorder=3,
            )
        left += width


def _draw_floor(axes: Axes, floor_ms: float) -> None:
    axes.axvspan(0, floor_ms, color="#0f9d8a", alpha=0.07, lw=0, zorder=0)
    axes.axvline(floor_ms, color="#0f9d8a", lw=1.2, ls=(0, (4, 3)), zorder=1)
    axes.text(
        floor_ms,
        -0.72,
        f"byte floor {floor_ms:.4g} ms ",
        ha="center",
        va="bottom",
        fontsize=8.5,
        color="#0b7a6b",
    )


def _dress(axes: Axes, rows: Mapping[str, Row]) -> None:
    bars = _bars(rows)
    axes.set_xlim(0, _longest(rows) * 1.2)
    axes.set_ylim(len(bars) - 0.45, -0.75)
    axes.set_yticks(range(len(bars)), [label for _, label, _ in bars], fontsize=9.5, color=INK)
    axes.set_xlabel("milliseconds   (× = time over X·C alone in torch)", fontsize=9, color=MUTED)
    axes.tick_params(axis="x", colors=MUTED, labelsize=8.5, length=0)
    axes.tick_params(axis="y", length=0, pad=8)
    axes.grid(axis="x", color=GRID, lw=0.8, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
