"""Put the numbers of results/ into README.md, docs/kernels/lora_linear.md and docs/pool.md.

    python benchmarks/readme_table.py [--check]

With --check nothing is written, and the exit code is 1 if a page would change.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
STEPS = ROOT / "benchmarks" / "results" / "steps.json"
KERNEL_PAGE = ROOT / "docs" / "kernels" / "lora_linear.md"
POOL_PAGE = ROOT / "docs" / "pool.md"
POOL = ROOT / "benchmarks" / "results" / "pool.json"
PEERS = [ROOT / "benchmarks" / "results" / f"peers_{kind}.json" for kind in ("decode", "prefill")]
REGION = re.compile(r"(<!-- numbers:begin[^>]*-->\n).*(<!-- numbers:end -->)", re.DOTALL)
NONE_YET = (
    "No measurements are committed yet. `make gpu-check` writes them to `benchmarks/results/`.\n"
)
LINES = (
    ("base", "`X @ C`, torch: the base GEMM alone"),
    ("matmul", "`matmul(X, C)`, Triton: the base GEMM alone"),
    ("serial", "`X @ C + (X @ A) @ B`, torch"),
    ("fused", "`X @ A`, then `fused_matmul_expand(X, C, Y, B)`"),
    ("lora_linear", "**`lora_linear`**"),
)


def region(text: str) -> str:
    """The part of a page between the markers."""
    found = REGION.search(text)
    if found is None:
        raise ValueError("the page has no <!-- numbers:begin --> ... <!-- numbers:end -->")
    return found.group(0)


def with_numbers(text: str, numbers: str) -> str:
    """A page with this text between the markers."""
    region(text)
    return REGION.sub(lambda found: found.group(1) + numbers + found.group(2), text)


def numbers(path: Path = STEPS) -> str:
    """What stands between the markers: a table, or a note that there is none yet."""
    if not path.exists():
        return NONE_YET
    return table(json.loads(path.read_text()))


def table(content: dict[str, Any]) -> str:
    """The table of one result file of ``loraplex bench steps``."""
    header, shape = content["header"], content["shape"]
    rows = {row["key"]: row for row in content["rows"]}
    base = rows["base"]["graph"]["median"]
    lines = [
        f"One layer at decode: M = {shape['m']}, K = {shape['k']}, N = {shape['n']}, one adapter "
        f"of rank {shape['r']}, {shape['dtype']}, CUDA-graph replay, weights from memory.",
        "",
        "| | µs (p20 to p80) | over the base GEMM | of the byte floor |",
        "| --- | ---: | ---: | ---: |",
    ]
    for key, label in LINES:
        row = rows[key]
        if row["graph"] is None:
            lines.append(f"| {label} | wrong result | | |")
            continue
        median, low, high = (1e3 * row["graph"][name] for name in ("median", "p20", "p80"))
        lines.append(
            f"| {label} | {median:.1f} ({low:.1f} to {high:.1f}) "
            f"| {row['graph']['median'] / base:.2f} | {row['floor_share']:.0%} |"
        )
    lines += [
        "",
        f"`{header['command']}` on {header['device']}, driver {header['driver']}, torch "
        f"{header['torch']}, Triton {header['triton']}, commit {header['commit']}, "
        f"{header['date'][:10]}. [All numbers](benchmarks/results/steps.json), "
        "[how they are made](benchmarks/README.md).",
    ]
    return "\n".join(lines) + "\n"


def peers(paths: Sequence[Path] = tuple(PEERS)) -> str:
    """The side-by-side table of one layer, ours and the best peer over cuBLAS alone."""
    contents = [json.loads(path.read_text()) for path in paths]
    cases: dict[str, dict[str, Any]] = {}
    for row in (row for content in contents for row in content["rows"]):
        cases.setdefault(row["case"], {})[row["provider"]] = row
    lines = [
        "| case | floor | base GEMM | `lora_linear` | SGLang triton_v2 |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for case, rows in cases.items():
        base = rows["base"]
        cells = [
            f"{rows[name]['us']:.1f} ({rows[name]['us'] / base['us']:.2f})"
            for name in ("loraplex", "sgl_v2")
        ]
        lines.append(
            f"| {case} | {base['floor_us']:.1f} | {base['us']:.1f} | " + " | ".join(cells) + " |"
        )
    sources = {
        f"{header['device']}, torch {header['torch']}, Triton {header['triton']}, commit "
        f"{header['commit'][:7]}, {header['date'][:10]}"
        for header in (content["header"] for content in contents)
    }
    lines += ["", f"In brackets the ratio to the base GEMM alone. {'; '.join(sorted(sources))}."]
    return "\n".join(lines) + "\n"


def pool(path: Path = POOL) -> str:
    """What the pool costs, against what it may cost."""
    content = json.loads(path.read_text())
    header = content["header"]
    lines = ["| | measured | at most | |", "| --- | ---: | ---: | --- |"]
    for figure in content["figures"]:
        most = "" if figure["most"] is None else f"{figure['most']:g}"
        missed = "" if figure["is_met"] else ", **missed**"
        lines.append(
            f"| {figure['name']} | {figure['value']:.4g} {figure['unit']} | {most}{missed} "
            f"| {figure['detail']} |"
        )
    lines += [
        "",
        f"`{header['command']}` on {header['device']}, driver {header['driver']}, torch "
        f"{header['torch']}, commit {header['commit'][:7]}, {header['date'][:10]}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare only")
    args = parser.parse_args()
    is_stale = False
    for page, text in ((README, numbers()), (KERNEL_PAGE, peers()), (POOL_PAGE, pool())):
        before = page.read_text()
        after = with_numbers(before, text)
        is_stale = is_stale or after != before
        if not args.check:
            page.write_text(after)
    return int(args.check and is_stale)


if __name__ == "__main__":
    sys.exit(main())
