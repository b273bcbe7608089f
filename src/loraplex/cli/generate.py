"""``loraplex generate``: answer a file of requests, each with its own adapter."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from loraplex.cli.arguments import whole

if TYPE_CHECKING:
    from loraplex.engines.transformers import Generator, Request, RequestError

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEMO = "demo"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "generate",
        help="generate for a file of requests, each with its own adapter",
        description="Answer a file of requests with greedy decoding, many adapters in one batch. "
        'A request is a line of JSON: {"prompt": "...", "adapter": "name" or null, '
        '"max_new_tokens": 64, "id": anything}; all but the prompt may be left out.',
        epilog="Exit codes: 0 all requests were answered, 1 some were refused (their lines have "
        "an error), 2 wrong usage or input.",
    )
    parser.add_argument(
        "--model", required=True, metavar="DIR",
        help="model folder, or 'demo' for the embedded model with all of its adapters",
    )  # fmt: skip
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=DIR", help="a PEFT folder (repeat)"
    )
    parser.add_argument("--requests", required=True, metavar="FILE.jsonl", help="'-' for stdin")
    parser.add_argument("--out", default="-", metavar="FILE.jsonl", help="stdout if left out")
    parser.add_argument("--batch-size", type=whole(1), default=16, metavar="N")
    parser.add_argument(
        "--max-new-tokens", type=whole(1), default=64, metavar="N", help="if a request has none"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: as in the model")
    parser.add_argument("--device", default="auto", help="auto: the GPU if there is one")
    parser.add_argument("--impl", default="auto", help="implementation of lora_linear")


def run(args: argparse.Namespace) -> int:
    """Answer the requests."""
    adapters = _parse_adapters(args.adapter)
    lines = _read_lines(args.requests)
    if "-" not in (args.out, args.requests) and _is_same_file(args.out, args.requests):
        raise ValueError(f"--out must not be the file of the requests, got {args.out!r} for both")
    _check_out(args.out)
    generator = _load(args, adapters)
    with _writable(args.out) as out:
        tally = _answer(generator, lines, out, args)
    seconds = max(tally.seconds, 1e-9)
    summary = (
        f"{tally.answered} requests answered, {tally.refused} refused; {tally.tokens} tokens in "
        f"{tally.seconds:.2f} s, {tally.tokens / seconds:.0f} tokens/s"
    )
    print(summary, file=sys.stderr if args.out == "-" else sys.stdout)
    return 1 if tally.refused else 0


@dataclass
class _Tally:
    answered: int = 0
    refused: int = 0
    tokens: int = 0
    seconds: float = 0.0


def _answer(
    generator: Generator, lines: list[tuple[int, bytes]], out: TextIO, args: argparse.Namespace
) -> _Tally:
    """Answer batch by batch in the order of the requests; a batch is written once it is done."""
    from loraplex.cli.render import progress

    tally = _Tally()
    with progress(len(lines)) as bar:
        bar.start("generate")
        for start in range(0, len(lines), args.batch_size):
            batch = [
                (number, _read(generator, line, args.max_new_tokens))
                for number, line in lines[start : start + args.batch_size]
            ]
            for record in _serve(generator, batch, tally):
                if "error" in record:
                    print(f"line {record['line']}: {record['error']}", file=sys.stderr)
                out.write(_line(record) + "\n")
                bar.advance()
            out.flush()
    return tally


def _read(generator: Generator, line: bytes, max_new_tokens: int) -> Request | RequestError:
    """The request of a line, or what is wrong with it."""
    from loraplex.engines.transformers import RequestError

    try:
        return generator.read(line, max_new_tokens=max_new_tokens)
    except RequestError as error:
        return error


def _serve(
    generator: Generator, batch: list[tuple[int, Request | RequestError]], tally: _Tally
) -> Iterator[dict[str, Any]]:
    from loraplex.engines.transformers import RequestError

    requests = [request for _, request in batch if not isinstance(request, RequestError)]
    start = time.perf_counter()
    answers = iter(generator.run(requests))
    tally.seconds += time.perf_counter() - start
    for number, request in batch:
        if isinstance(request, RequestError):
            tally.refused += 1
            yield _with_id(request.id, {"line": number, "error": str(request)})
            continue
        answer = next(answers)
        tally.answered += 1
        tally.tokens += len(answer.tokens)
        record = {
            "line": number,
            "prompt": request.prompt,
            "adapter": request.adapter,
            "text": answer.text,
            "tokens": len(answer.tokens),
            "finish": answer.finish,
        }
        yield _with_id(request.id, record)


def _line(record: dict[str, Any]) -> str:
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair in an id: as the request spelled it
        return json.dumps(record)
    return text


def _with_id(number: Any, record: dict[str, Any]) -> dict[str, Any]:
    return record if number is None else {"id": number, **record}


def _load(args: argparse.Namespace, adapters: dict[str, Path]) -> Generator:
    import torch
    from safetensors import SafetensorError

    from loraplex.engines.transformers import Generator, load_model

    quiet()
    device = pick_device(args.device)
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    folder = Path(args.model)
    if args.model == DEMO:
        from loraplex.demo import NAME, demo_adapters, demo_folder

        folder, adapters = demo_folder() / NAME, {**demo_adapters(), **adapters}
        # fp16 is how the model is packed; on a CPU it is slow.
        dtype = torch.float32 if dtype is None and device.type == "cpu" else dtype
    try:
        model, tokenizer = load_model(folder, dtype=dtype, device=device)
    except (TypeError, AttributeError, KeyError, SafetensorError) as error:
        # what transformers says of broken files
        raise ValueError(f"--model {folder} cannot be loaded: {error}") from error
    try:
        return Generator(model, tokenizer, adapters, max_batch=args.batch_size, impl=args.impl)
    except TypeError as error:  # a kind of model or layer that attach refuses
        raise ValueError(f"--model {folder}: {error}") from error


def quiet() -> None:
    """No loading bars of transformers, and no crash where stdout cannot show a sign."""
    from loraplex.nn.library import import_transformers

    import_transformers().logging.disable_progress_bar()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def pick_device(name: str) -> Any:
    """The device of a ``--device`` argument.

    Raises:
        ValueError: no such device here.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name!r} cannot be used here: {error}") from None
    if device.type == "meta":
        raise ValueError(f"--device {name!r} cannot be used here: it holds no values")
    return device


def _parse_adapters(pairs: list[str]) -> dict[str, Path]:
    adapters: dict[str, Path] = {}
    for pair in pairs:
        name, sign, folder = pair.partition("=")
        if not sign or not name or not folder:
            raise ValueError(f"--adapter must be NAME=DIR, got {pair!r}")
        if name in adapters:
            raise ValueError(f"--adapter {name!r} is given twice")
        adapters[name] = Path(folder)
    return adapters


def _read_lines(path: str) -> list[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers; bytes, since one may be broken."""
    raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    return [(number, line) for number, line in enumerate(raw.split(b"\n"), 1) if line.strip()]


def _is_same_file(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _check_out(path: str) -> None:
    """Refuse what cannot be written to before the model is loaded; nothing is created yet."""
    if path == "-":
        return
    if Path(path).is_dir():
        raise ValueError(f"--out must be a file, got the folder {path!r}")
    if not Path(path).parent.is_dir():
        raise ValueError(f"--out must be in a folder that exists, got {path!r}")


@contextlib.contextmanager
def _writable(path: str) -> Iterator[TextIO]:
    if path == "-":
        yield sys.stdout
        return
    with open(path, "w", encoding="utf-8") as file:
        yield file
