"""``loraplex demo``: one mixed batch on the embedded model, compared with PEFT token by token."""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loraplex.cli.generate import pick_device, quiet
from loraplex.cli.render import Column, print_table, progress

PROMPTS = (
    "Tell me a story about the fox and the lantern.",
    "Where does the owl live?",
    "What should the penguin take to the beach?",
)
DTYPES = ("float32", "float16", "bfloat16")
LIMIT = 96


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "demo",
        help="serve one mixed batch on the embedded model and compare it with PEFT",
        description="Serve one batch in which every row has its own adapter, base rows among "
        "them, on a tiny embedded model; then generate the same rows with the PEFT library, one "
        "adapter at a time, and compare every token.",
        epilog="Exit codes: 0 every row equals PEFT's (or the comparison was skipped, and said "
        "so), 1 a row differs.",
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="ask this (repeat)")
    parser.add_argument("--device", default="auto", help="auto: the GPU if there is one")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32",
        help="float32 by default: in half precision two libraries may round a tie differently",
    )  # fmt: skip
    parser.add_argument("--impl", default="auto", help="implementation of lora_linear")
    parser.add_argument("--no-proof", action="store_true", help="do not compare with PEFT")


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    import torch

    from loraplex.demo import demo_adapters

    quiet()
    device = pick_device(args.device)
    dtype = getattr(torch, args.dtype)
    prompts = args.prompt or list(PROMPTS)
    if "" in prompts:
        raise ValueError("--prompt must not be empty, got ''")
    adapters = demo_adapters()
    rows = [(prompt, adapter) for prompt in prompts for adapter in (None, *adapters)]
    print(
        f"One batch of {len(rows)} rows on {device} in {args.dtype}: {len(prompts)} prompt(s), "
        f"each for the base model and {len(adapters)} adapters."
    )
    answers, seconds, tokenizer = _serve(rows, adapters, dtype, device, args.impl)
    proof, peft_seconds = _prove(rows, adapters, dtype, device, args.no_proof)
    verdicts = _verdicts(answers, proof)
    _show(
        rows, adapters, [tokenizer.decode(a, skip_special_tokens=True) for a in answers], verdicts
    )
    tokens = sum(map(len, answers))
    print(f"\nloraplex, one mixed batch:     {tokens} tokens in {seconds:.2f} s")
    if proof is None:
        print(f"Proof SKIPPED: {_why_skipped(args.no_proof)}.")
        return 0
    print(f"PEFT, one adapter at a time:   {sum(map(len, proof))} tokens in {peft_seconds:.2f} s")
    bad = [number for number, verdict in enumerate(verdicts) if verdict != "equal"]
    if bad:
        print(f"FAILED: {len(bad)} of {len(rows)} rows differ from PEFT.")
        return 1
    print(f"PROVED: all {len(rows)} rows equal PEFT's, token by token.")
    return 0


def _serve(
    rows: Sequence[tuple[str, str | None]],
    adapters: dict[str, Path],
    dtype: Any,
    device: Any,
    impl: str,
) -> tuple[list[list[int]], float, Any]:
    """The new tokens of every row from one batch, and the seconds that it took."""
    from loraplex.demo import load_demo_model
    from loraplex.demo.proof import greedy
    from loraplex.nn import attach

    base, tokenizer, _ = load_demo_model(dtype=dtype, device=device)
    most = base.config.max_position_embeddings - LIMIT
    for prompt, _ in rows:
        length = len(tokenizer(prompt)["input_ids"])
        if length > most:
            raise ValueError(f"--prompt must have at most {most} tokens, got {length}")
    model = attach(base, max_adapters=len(adapters), impl=impl)
    for name, path in adapters.items():
        model.add_adapter(name, path)
    prompts, names = [prompt for prompt, _ in rows], [name for _, name in rows]
    # One short round first: kernels are compiled and caches are filled outside the measured one.
    greedy(model, tokenizer, prompts, limit=2, adapter_names=names)
    start = time.perf_counter()
    answers = greedy(model, tokenizer, prompts, limit=LIMIT, adapter_names=names)
    return answers, time.perf_counter() - start, tokenizer


def _prove(
    rows: Sequence[tuple[str, str | None]],
    adapters: dict[str, Path],
    dtype: Any,
    device: Any,
    is_skipped: bool,
) -> tuple[list[list[int]] | None, float]:
    """PEFT's tokens of every row, None without PEFT, and the seconds."""
    if is_skipped or not _has_peft():
        return None, 0.0
    from loraplex.demo import load_demo_model
    from loraplex.demo.proof import generate_one_adapter_at_a_time

    model, tokenizer, _ = load_demo_model(dtype=dtype, device=device)
    found: dict[int, list[int]] = {}
    start = time.perf_counter()
    with progress(len(adapters) + 1) as bar:
        bar.start("the same rows with PEFT, one adapter at a time")
        for _, answers in generate_one_adapter_at_a_time(
            model, tokenizer, adapters, rows, limit=LIMIT
        ):
            found |= answers
            bar.advance()
    return [found[number] for number in range(len(rows))], time.perf_counter() - start


def _verdicts(answers: list[list[int]], proof: list[list[int]] | None) -> list[str]:
    from loraplex.demo.proof import first_difference

    if proof is None:
        return ["not compared"] * len(answers)
    places = [first_difference(a, p) for a, p in zip(answers, proof, strict=True)]
    return ["equal" if place is None else f"differs at {place}" for place in places]


def _show(
    rows: Sequence[tuple[str, str | None]],
    adapters: dict[str, Path],
    texts: list[str],
    verdicts: list[str],
) -> None:
    columns = [Column("adapter"), Column("rank", True), Column("PEFT"), Column("text")]
    ranks = {name: _ranks(path) for name, path in adapters.items()}
    for prompt in dict.fromkeys(prompt for prompt, _ in rows):
        numbers = [number for number, row in enumerate(rows) if row[0] == prompt]
        lines = [
            [
                rows[number][1] or "(base)",
                ranks.get(rows[number][1] or "", ""),
                verdicts[number],
                texts[number],
            ]
            for number in numbers
        ]
        bad = [i for i, number in enumerate(numbers) if verdicts[number].startswith("differs")]
        print()
        print_table(columns, lines, title=prompt, bad_rows=bad)


def _ranks(path: Path) -> str:
    """The ranks of an adapter as its tensors have them, with what is special about it."""
    from loraplex.adapters import load_adapter

    adapter = load_adapter(path)
    ranks = sorted({module.rank for module in adapter.modules.values()})
    special = [
        name
        for name, on in (("rs", adapter.spec.use_rslora), ("DoRA", "dora" in adapter.features))
        if on
    ]
    return " ".join([*special, "/".join(map(str, ranks))])


def _has_peft() -> bool:
    return importlib.util.find_spec("peft") is not None


def _why_skipped(is_asked: bool) -> str:
    if is_asked:
        return "--no-proof was given"
    return "peft is not installed; pip install 'loraplex[hf]' and run again"
