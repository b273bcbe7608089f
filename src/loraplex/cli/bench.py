"""``loraplex bench``; ``steps``: the ladder of one LoRA layer, measured on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from loraplex import env
from loraplex.bench.header import make_header
from loraplex.bench.layer import Shape
from loraplex.bench.plot import save_plot
from loraplex.bench.steps import Ladder, Row, num_pieces, run_ladder
from loraplex.bench.timing import Timing
from loraplex.cli import suite
from loraplex.cli.arguments import PICTURES, check_file, check_picture, whole
from loraplex.cli.render import Column, print_table, progress

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Llama-3-8B's gate_up projection at batch 64, and something the interpreter does in a second.
GPU_SIZE = {"m": 64, "k": 4096, "n": 28672, "r": 8, "warmup": 25, "repeat": 100}
CPU_SIZE = {"m": 8, "k": 256, "n": 512, "r": 8, "warmup": 1, "repeat": 9}
NO_GPU = (
    "No GPU here: a small size on the CPU path. Triton kernels run in the interpreter, which "
    "checks their results; its times say nothing about a GPU."
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` with its workloads."""
    parser = subparsers.add_parser("bench", help="measure LoRA layers")
    workloads = parser.add_subparsers(title="workloads", metavar="WORKLOAD", dest="workload")
    workloads.required = True
    steps = workloads.add_parser(
        "steps",
        help="serial torch, Triton matmul, fused expand, lora_linear on one shape",
        description="Climb from serial torch to lora_linear on one layer. Exit code 1 if any "
        "result is wrong; a wrong result gets no time.",
    )
    for name, meaning in (
        ("m", "tokens"),
        ("k", "in-features"),
        ("n", "out-features"),
        ("r", "rank of the adapter"),
        ("warmup", "calls before the clock starts"),
        ("repeat", "timed calls, and timed graph replays"),
    ):
        steps.add_argument(
            f"--{name}",
            type=whole(0 if name == "warmup" else 1),
            help=f"{meaning} (default {GPU_SIZE[name]}; without a GPU {CPU_SIZE[name]})",
        )
    steps.add_argument("--dtype", choices=DTYPES, default="float16", help="default float16")
    steps.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    steps.add_argument(
        "--plot", type=Path, metavar="FILE", help=f"draw the ladder: {', '.join(PICTURES)}"
    )
    suite.add_parser(workloads)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; 1 if a result is wrong."""
    return suite.run(args) if args.workload == "suite" else run_steps(args)


def run_steps(args: argparse.Namespace) -> int:
    """The ladder of one layer."""
    check_file("--json", args.json)
    check_picture("--plot", args.plot)
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        env.use_interpreter()
        # Threads that wait for each other cost more than these sizes gain from them.
        torch.set_num_threads(1)
        print(NO_GPU + "\n")
    given = {name: getattr(args, name) for name in GPU_SIZE if getattr(args, name) is not None}
    size = {**(GPU_SIZE if has_gpu else CPU_SIZE), **given}
    shape = Shape(size["m"], size["k"], size["n"], size["r"], DTYPES[args.dtype])
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    header = make_header()
    with progress(num_pieces(is_gpu=has_gpu)) as bar:
        ladder = run_ladder(
            shape,
            device,
            warmup=size["warmup"],
            repeat=size["repeat"],
            on_start=bar.start,
            on_done=bar.advance,
        )
    print_ladder(ladder, header)
    if args.json:
        write_json(args.json, {"header": header, **as_json(ladder, size["warmup"], size["repeat"])})
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        save_plot(ladder, header, args.plot)
        print(f"wrote {args.plot}")
    return 0 if ladder.is_correct else 1


def print_ladder(ladder: Ladder, header: Mapping[str, str]) -> None:
    """The header, the table, the verdicts and the two numbers to remember."""
    shape, ceilings = ladder.shape, ladder.ceilings
    dtype = str(shape.dtype).removeprefix("torch.")
    print(" · ".join(f"{key} {header[key]}" for key in ("driver", "torch", "triton", "commit")))
    print(f"{header['device']}, {dtype}, M={shape.m} K={shape.k} N={shape.n} R={shape.r}")
    if ceilings is not None:
        print(
            f"ceilings measured now: copy {ceilings.bytes_per_second / 1e9:.4g} GB/s, "
            f"matmul {ceilings.flops_per_second / 1e12:.4g} TFLOP/s; "
            f"{ladder.sets} sets of weights in turn, so that they come from memory"
        )
    print()
    has_graph = any(row.graph for row in ladder.rows)
    timers = ["event ms", "p20 to p80", "graph ms", "p20 to p80"]
    if not has_graph:
        timers = ["host ms", "p20 to p80"]
    columns = [
        Column("step"),
        *(Column(title, is_number=True) for title in timers),
        *(Column(title, is_number=True) for title in ("TFLOP/s", "GB/s", "ratio")),
        Column("to"),
        Column("of floor", is_number=True),
        Column("result"),
    ]
    bad = [i for i, row in enumerate(ladder.rows) if row.verdict and not row.verdict.is_correct]
    labels = {row.key: row.label for row in ladder.rows}
    print_table(columns, [_cells(row, labels, has_graph) for row in ladder.rows], bad_rows=bad)
    print()
    for row in ladder.rows:
        if row.verdict is not None and row.key != "base":
            print(f"{row.label}\n    {row.verdict}")
    print(f"\n{summary(ladder)}")


def summary(ladder: Ladder) -> str:
    """The LoRA tax and the distance from the floor, in a sentence."""
    rows = {row.key: row for row in ladder.rows}
    ours, base, serial = (rows[key].best for key in ("lora_linear", "base", "serial"))
    if not ladder.is_correct or ours is None or base is None or serial is None:
        return "No summary: a result is wrong."
    floor = rows["lora_linear"].floor_ms
    if floor is None:
        return "No summary of speed without a GPU; every result above is right."
    return (
        f"LoRA tax (lora_linear over X @ C alone): {ours.median / base.median:.3f}; "
        f"serial torch pays {serial.median / base.median:.3f}. "
        f"Byte floor {floor:.4g} ms: lora_linear takes {ours.median / floor:.2f} times that."
    )


def as_json(ladder: Ladder, warmup: int, repeat: int) -> dict[str, Any]:
    """The ladder as plain values, times in milliseconds."""
    content = asdict(replace(ladder, rows=()))
    content["shape"]["dtype"] = str(ladder.shape.dtype).removeprefix("torch.")
    content["timing"] = {"warmup": warmup, "repeat": repeat, "unit": "ms"}
    content["rows"] = [asdict(row) for row in ladder.rows]
    content["summary"] = summary(ladder)
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result file and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")
    print(f"wrote {path}")


def _cells(row: Row, labels: Mapping[str, str], has_graph: bool) -> list[str]:
    times = [*_time_cells(row.eager)]
    if has_graph:
        times += _time_cells(row.graph)
    result = ""
    if row.verdict is not None:
        result = "correct" if row.verdict.is_correct else "WRONG"
    return [
        row.label + (" (interpreter)" if row.is_interpreted else ""),
        *times,
        _number(row.tflops, ".4g"),
        _number(row.gb_per_s, ".4g"),
        _number(row.ratio, ".3f" if (row.ratio or 0) < 100 else ".0f"),
        labels[row.against],
        _number(row.floor_share, ".0%"),
        result,
    ]


def _time_cells(timing: Timing | None) -> list[str]:
    if timing is None:
        return ["-", "-"]
    return [f"{timing.median:.4f}", f"{timing.p20:.4f} to {timing.p80:.4f}"]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
