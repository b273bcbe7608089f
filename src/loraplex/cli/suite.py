"""``loraplex bench suite``: a model's layers beside cuBLAS, merged weights, torch and peers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from loraplex import env
from loraplex.bench.ceilings import Ceilings, measure_ceilings
from loraplex.bench.header import make_header
from loraplex.bench.layers import CONFIGS, TINY, ModelLayers, find_model
from loraplex.bench.report import write_report
from loraplex.bench.suite import (
    BLOCK,
    CASES,
    CURVE_PROVIDERS,
    CURVES,
    TINY_CASES,
    TINY_CURVES,
    Case,
    Row,
    run_case,
)
from loraplex.bench.suite_peers import peers
from loraplex.bench.suite_providers import Provider, providers
from loraplex.cli.arguments import check_file, check_folder, check_matplotlib, whole
from loraplex.cli.render import Column, Progress, print_table, progress

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NO_GPU = (
    "No GPU here: a rehearsal on tiny layers. Triton kernels run in the interpreter, which checks "
    "their results; its times mean nothing."
)


def add_parser(workloads: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``suite`` to the workloads of ``bench``."""
    parser = workloads.add_parser(
        "suite",
        help="all layers of a model, decode and prefill, ours beside others, with a report",
        description="Time a model's linear layers with LoRA, provider by provider, in one run. "
        "Exit code 1 if any of our results is wrong; a wrong result gets no time.",
    )
    parser.add_argument(
        "--model",
        default="llama-3-8b",
        help=f"{', '.join(CONFIGS)}, or a config.json (default llama-3-8b)",
    )
    parser.add_argument(
        "--tp", type=whole(1), default=0, help="tensor-parallel degree of a config.json"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default bfloat16")
    parser.add_argument(
        "--cases",
        choices=("all", "decode", "prefill", "none"),
        default="all",
        help="which table (default all)",
    )
    parser.add_argument(
        "--curves",
        nargs="?",
        const=",".join(CURVES),
        default="",
        metavar="NAMES",
        help=f"also time curves: {','.join(CURVES)} (all if no name is given)",
    )
    parser.add_argument("--repeat", type=int, default=25, help="timed graph replays (default 25)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report for a browser")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write pictures into a folder")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; 1 if one of our results is wrong or missing."""
    has_gpu = torch.cuda.is_available()
    if args.repeat < 1:
        raise ValueError(f"--repeat must be at least 1, got {args.repeat}")
    for name in ("json", "html"):
        check_file(f"--{name}", getattr(args, name))
    check_folder("--plot", args.plot)
    if args.plot:
        check_matplotlib("--plot")
    model = find_model(args.model, args.tp)
    curves = find_curves(args.curves, CURVES if has_gpu else TINY_CURVES)
    cases: Sequence[Case] = CASES
    if not has_gpu:
        env.use_interpreter()
        torch.set_num_threads(1)
        print(NO_GPU + "\n")
        model, cases = TINY, TINY_CASES
    elif args.cases != "all":
        cases = [case for case in CASES if case.phase == args.cases]
    cases = [] if args.cases == "none" else cases
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    dtype = DTYPES[args.dtype] if has_gpu else torch.float16
    ways = [*providers(is_gpu=has_gpu), *(peers() if has_gpu else [])]
    header = make_header()
    ceilings = measure_ceilings(device, dtype) if has_gpu else None
    rounds = (5, args.repeat) if has_gpu else (0, 1)

    def measure(case: Case, chosen: Sequence[Provider], bar: Progress) -> list[Row]:
        return run_case(
            case, model, dtype, device, chosen, ceilings, rounds,
            on_start=bar.start, on_done=bar.advance,
        )  # fmt: skip

    few = [way for way in ways if way.name in CURVE_PROVIDERS]
    points = sum(len(curves[name][1]) for name in curves)
    rows: list[Row] = []
    with progress(len(model.layers) * (len(cases) * len(ways) + points * len(few))) as bar:
        for case in cases:
            rows += measure(case, ways, bar)
        drawn = [
            as_curve(name, about, [(x, measure(case, few, bar)) for x, case in along])
            for name, (about, along) in curves.items()
        ]
    content = as_content(header, model, dtype, ceilings, cases, ways, rows, drawn)
    for case in cases:
        print_case(case, [row for row in rows if row.case == case.name], ways, has_gpu=has_gpu)
    write_files(content, args)
    return 0 if print_reasons(content, ways) else 1


def find_curves(text: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """The curves that are named, of those that this machine can draw.

    Raises:
        ValueError: an unknown name.
    """
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in CURVES:
            raise ValueError(f"--curves must be of {', '.join(CURVES)}, got {name!r}")
    return {name: known[name] for name in names if name in known}


def as_curve(name: str, about: str, along: Sequence[tuple[int, Sequence[Row]]]) -> dict[str, Any]:
    """One curve of the block's time as plain values."""
    points = []
    for x, rows in along:
        block = {row.provider: row for row in rows if row.layer == BLOCK}
        ours = block["lora_linear"].floor_ms
        points.append({
            "x": x,
            "floor_us": None if ours is None else 1e3 * ours,
            "us": {n: 1e3 * row.ms.median if row.ms else None for n, row in block.items()},
            "rows": [asdict(row) for row in rows],
        })  # fmt: skip
    return {"name": name, "about": about, "providers": list(CURVE_PROVIDERS), "points": points}


def as_content(
    header: Mapping[str, str],
    model: ModelLayers,
    dtype: torch.dtype,
    ceilings: Ceilings | None,
    cases: Sequence[Case],
    ways: Sequence[Provider],
    rows: Sequence[Row],
    curves: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Everything as plain values; times in milliseconds."""
    return {
        "header": dict(header),
        "model": asdict(model),
        "dtype": str(dtype).removeprefix("torch."),
        "is_rehearsal": ceilings is None,
        "ceilings": asdict(ceilings) if ceilings else None,
        "providers": {way.name: way.about for way in ways},
        "cases": [{"name": case.name, "phase": case.phase, **asdict(case)} for case in cases],
        "rows": [asdict(row) for row in rows],
        "curves": list(curves),
    }


def print_case(case: Case, rows: Sequence[Row], ways: Sequence[Provider], *, has_gpu: bool) -> None:
    """One table: layers down, providers across."""
    columns = [Column("layer"), Column("floor us", is_number=True)]
    columns += [Column(way.name, is_number=True) for way in ways]
    columns += [Column("x floor", is_number=True), Column("share", is_number=True)]
    lines = []
    for layer in dict.fromkeys(row.layer for row in rows):
        own = {row.provider: row for row in rows if row.layer == layer}
        ours = own["lora_linear"]
        lines.append([
            layer,
            "-" if ours.floor_ms is None else f"{1e3 * ours.floor_ms:.1f}",
            *(_cell(own[way.name], has_gpu=has_gpu) for way in ways),
            "-" if ours.multiple is None else f"{ours.multiple:.2f}",
            "-" if ours.share is None else f"{ours.share:.0%}",
        ])  # fmt: skip
    unit = "us (tax)" if has_gpu else "right or not"
    print_table(columns, lines, title=f"{case.phase}: {case.name}; {unit}")
    print()


def print_reasons(content: Mapping[str, Any], ways: Sequence[Provider]) -> bool:
    """Say why there is no time where there is none; whether everything of ours has one."""
    ours = {way.name for way in ways if way.is_ours}
    points = [point for curve in content["curves"] for point in curve["points"]]
    rows = [*content["rows"], *(row for point in points for row in point["rows"])]
    missing = [row for row in rows if row["why"] and row["layer"] != BLOCK]
    for row in missing:
        print(f"{row['provider']}, {row['layer']}, {row['case']}: {row['why']}")
    return not any(row["provider"] in ours for row in missing)


def write_files(content: Mapping[str, Any], args: argparse.Namespace) -> None:
    """JSON, report and pictures, as asked for."""
    from loraplex.cli.bench import write_json

    if args.json:
        write_json(args.json, content)
    if not args.html and not args.plot:
        return
    from loraplex.bench import report_plot

    try:
        figures = report_plot.draw(content)
    except ImportError:
        if args.plot:
            raise
        # a report without pictures has all numbers still
        figures = {}
    if args.html:
        pictures = {name: report_plot.as_svg(figure) for name, figure in figures.items()}
        write_report(args.html, content, pictures)
        print(f"wrote {args.html}")
    if args.plot:
        for path in report_plot.save(figures, args.plot):
            print(f"wrote {path}")


def _cell(row: Row, *, has_gpu: bool) -> str:
    if row.ms is None:
        return "no time"
    if not has_gpu:
        return "right"
    tax = f" ({row.tax:.3f})" if row.tax is not None and row.provider != "base" else ""
    return f"{1e3 * row.ms.median:.1f}{tax}"
