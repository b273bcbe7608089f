"""One picture of a result file: what each backend keeps of the engine's rate without LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_parts import BACKENDS

COLOURS = {"csgmv": "#c3c8ce", "triton": "#9aa5b1", "triton_v2": "#6b7280", "loraplex": "#0f9d8a"}
LABELS = {"main": "rank 16", "rank64": "rank 64", "many": "64 adapters", "tp2": "two GPUs"}


def kept(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per load and case, per backend: percent of the rate without LoRA, of decode or of prefill."""

    def rate(row: dict[str, Any]) -> float:
        return float(1 / row["ms_per_token"] if row["new"] > 1 else row["prompt_tokens_per_s"])

    def load(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["part"], row["batch"], row["prompt"], row["new"]

    bases = {load(row): rate(row) for row in rows if row["backend"] == "none"}
    table: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["backend"] == "none" or load(row) not in bases:
            continue
        what = "decode" if row["new"] > 1 else "prefill"
        part = LABELS.get(row["part"], row["part"])
        name = f"{part}, batch {row['batch']}, {what}, {row['case']}"
        table.setdefault(name, {})[row["backend"]] = 100 * rate(row) / bases[load(row)]
    return table


def draw(result: dict[str, Any], file: Path) -> None:
    """Bars, a group per load and case."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    table = kept(result["rows"])
    backends = [name for name in BACKENDS if any(name in values for values in table.values())]
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.62 * len(table)), layout="constrained")
    height = 0.8 / max(1, len(backends))
    for place, backend in enumerate(backends):
        spots = [group + place * height for group in range(len(table))]
        values = [row.get(backend, 0.0) for row in table.values()]
        bars = axes.barh(spots, values, height, label=backend, color=COLOURS.get(backend))
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
    middle = 0.4 - height / 2
    axes.set_yticks([group + middle for group in range(len(table))], list(table))
    axes.invert_yaxis()
    axes.axvline(100, color="#1b1f24", linewidth=0.8)
    axes.set_xlim(0, max([108.0, *(1.08 * v for row in table.values() for v in row.values())]))
    axes.set_xlabel("% of the rate without LoRA")
    header = result["header"]
    axes.set_title(f"SGLang {header['sglang']} on {header['device']}, torch {header['torch']}")
    axes.legend(loc="lower left", ncols=4, fontsize=8)
    figure.savefig(file, dpi=150)
