"""``loraplex tune``: a tuning table for one model's layers, measured on this GPU."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from loraplex import env
from loraplex.bench.header import make_header
from loraplex.bench.layers import CONFIGS, TINY, find_model
from loraplex.bench.layers_batch import Batch
from loraplex.bench.tune import Search, default_workers, tune
from loraplex.bench.tune_journal import Journal
from loraplex.bench.tune_table import Winner, make_rules, write_table
from loraplex.cli.arguments import check_folder, whole
from loraplex.cli.render import Column, print_table, progress

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = (1, 16, 64, 256, 1024, 4096)
NO_GPU = (
    "No GPU here: a rehearsal of two candidates on a tiny layer in Triton's interpreter. It checks "
    "results; its times mean nothing, and it writes a table only where --out says."
)

MOST_REASONS = 5
REHEARSED = "rehearsed in Triton's interpreter, without a time that means anything"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``tune``."""
    parser = subparsers.add_parser(
        "tune",
        help="measure block sizes for a model's layers and write a tuning table",
        description="Sweep kernels and block sizes over a model's layers and write a tuning table "
        "that loads on the next run. Can be interrupted; --resume goes on.",
    )
    parser.add_argument(
        "--model",
        default="llama-3-8b",
        help=f"{', '.join(CONFIGS)}, or a config.json (default llama-3-8b)",
    )
    parser.add_argument(
        "--tp", type=whole(1), default=0, help="tensor-parallel degree of a config.json"
    )
    parser.add_argument("--layers", help="only these of qkv,o,gate_up,down")
    parser.add_argument("--m", help=f"batch sizes (default {','.join(map(str, SIZES))})")
    parser.add_argument("--adapters", type=int, default=8, help="slots of the pool (default 8)")
    parser.add_argument("--rank", type=int, default=16, help="rank capacity (default 16)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default bfloat16")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: where tables of one's own are"
    )
    parser.add_argument("--resume", action="store_true", help="go on where a run was stopped")
    parser.add_argument(
        "--workers", type=whole(0), help="compiling processes (default: one per core)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; 1 if some layer has no right candidate."""
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        env.use_interpreter()
        torch.set_num_threads(1)
        print(NO_GPU + "\n")
    batches = make_batches(args, has_gpu=has_gpu)
    check_folder("--out", args.out)
    folder = args.out or (env.tuning_dir() if has_gpu else None)
    if folder is None and has_gpu:
        raise ValueError("--out must name a folder, since LORAPLEX_TUNING_DIR is set to nothing")
    header = make_header()
    arch = env.gpu_arch(torch.cuda.current_device()) if has_gpu else "cpu"
    started = time.monotonic()
    journal = open_journal(folder, header, arch, resume=args.resume)
    winners = _tune(batches, args.workers, arch, journal, has_gpu=has_gpu)
    if has_gpu:
        print_winners(winners)
    else:
        right = sum(winner.best is not None for winner in winners)
        print(f"\n{right} of {len(winners)} layers have a right candidate")
    # a wrong result is a fault of ours, one that does not compile or fit is not
    reasons = sorted(journal.reasons(), key=lambda reason: not reason[0].startswith("wrong"))
    for why, count in reasons[:MOST_REASONS]:
        print(f"{count} without a time, {why}")
    minutes = (time.monotonic() - started) / 60
    print(f"\n{header['device']}, {arch}: {minutes:.1f} minutes")
    if folder is not None:
        about = (
            f"measured on {header['device']} with torch {header['torch']}, triton "
            f"{header['triton']}, loraplex {header['loraplex']} ({header['commit']}), "
            f"{header['date']}, by {header['command']}"
        )
        path = folder / f"{arch}.json"
        write_table(path, make_rules(winners, "" if has_gpu else REHEARSED), about)
        print(f"wrote {path}")
        if folder != env.tuning_dir():
            print(f"It is read where LORAPLEX_TUNING_DIR={folder}")
    return 0 if all(winner.best is not None for winner in winners) else 1


def make_batches(args: argparse.Namespace, *, has_gpu: bool) -> list[Batch]:
    """What is measured: every layer at every batch size.

    Raises:
        ValueError: an unknown model or layer, or a size that is no positive whole number.
    """
    for name in ("adapters", "rank"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.rank % 8:
        # ranks are stored in multiples of eight, and rules are for pools that do so
        raise ValueError(f"--rank must be a multiple of 8, got {args.rank}")
    model = find_model(args.model, args.tp)
    sizes = SIZES if args.m is None else parse_sizes("--m", args.m)
    layers = model.layers
    if args.layers is not None:
        names = args.layers.split(",")
        known = {layer.name: layer for layer in layers}
        for name in names:
            if name not in known:
                raise ValueError(f"--layers must be of {', '.join(known)}, got {name!r}")
        layers = tuple(known[name] for name in names)
    if not has_gpu:
        return [Batch(TINY.layers[0], 4, 2, 8, torch.float16)]
    dtype = DTYPES[args.dtype]
    return [
        Batch(layer, m, min(m, args.adapters), args.rank, dtype, slots=args.adapters)
        for layer in layers
        for m in sizes
    ]


def parse_sizes(name: str, text: str) -> tuple[int, ...]:
    """Positive whole numbers with commas between, in order, each once.

    Raises:
        ValueError: names the argument and the word that is none.

    Example:
        >>> parse_sizes("--m", "64,1,16")
        (1, 16, 64)
    """
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise ValueError(f"{name} must be positive whole numbers, got {word!r}")
    return tuple(sorted({int(word) for word in text.split(",")}))


def open_journal(
    folder: Path | None, header: Mapping[str, str], arch: str, *, resume: bool
) -> Journal:
    """The journal beside the table; in memory where no table is written.

    Raises:
        LoraplexError: ``resume``, but what is there was measured on something else.
    """
    keys = ("device", "torch", "triton", "loraplex", "commit")
    identity = {"arch": arch, **{key: header[key] for key in keys}}
    path = folder / f"{arch}.journal.jsonl" if folder is not None else None
    return Journal(path, identity, resume=resume)


def _tune(
    batches: Sequence[Batch], workers: int | None, arch: str, journal: Journal, *, has_gpu: bool
) -> list[Winner]:
    if has_gpu:
        device = torch.device("cuda", torch.cuda.current_device())
        search = Search(
            env.num_multiprocessors(torch.cuda.current_device()),
            arch,
            default_workers(device) if workers is None else workers,
        )
    else:
        device, search = torch.device("cpu"), Search(132, arch, 0, is_rehearsal=True)
    try:
        return tune(batches, device, journal, search, progress=progress, say=print)
    except KeyboardInterrupt:
        print(f"\nstopped; what was measured is in {journal.path}: go on with --resume")
        raise


def print_winners(winners: Sequence[Winner]) -> None:
    """One line per layer and batch size."""
    columns = [
        Column("layer"),
        Column("M", is_number=True),
        Column("base us", is_number=True),
        Column("gemm_add us", is_number=True),
        Column("best us", is_number=True),
        Column("tax", is_number=True),
        Column("skipped", is_number=True),
        Column("wrong", is_number=True),
        Column("best"),
    ]
    rows = []
    for w in winners:
        tax = w.ms / w.base_ms if w.ms is not None else None
        rows.append([
            w.batch.layer.name, str(w.batch.m), _us(w.base_ms), _us(w.add_ms), _us(w.ms),
            "-" if tax is None else f"{tax:.3f}", str(w.failed), str(w.wrong),
            "no right candidate" if w.best is None else _blocks(w),
        ])  # fmt: skip
    bad = [number for number, winner in enumerate(winners) if winner.best is None]
    print_table(columns, rows, bad_rows=bad)


def _us(ms: float | None) -> str:
    return "-" if ms is None else f"{1e3 * ms:.1f}"


def _blocks(winner: Winner) -> str:
    assert winner.best is not None
    main = winner.best.configs.get("linear") or winner.best.configs["expand"]
    tile = "x".join(str(main[name]) for name in ("block_m", "block_n", "block_k") if name in main)
    split = f" split {main['split_k']}" if main.get("split_k", 1) > 1 else ""
    way = " specialised" if winner.best.is_specialized else ""
    return f"{winner.best.impl}{way} {tile}{split}"
