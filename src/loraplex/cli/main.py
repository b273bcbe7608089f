"""Entry point of the ``loraplex`` command."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from loraplex import env
from loraplex.errors import LoraplexError
from loraplex.version import __version__

COMMANDS = {
    "demo": "serve one mixed batch on the embedded model and compare it with PEFT",
    "generate": "generate for a file of requests, each with its own adapter",
    "bench": "measure: one LoRA layer step by step, or a model's layers beside others",
    "check": "verify the results of every implementation on this machine",
    "tune": "measure block sizes for a model's layers and write a tuning table",
    "inspect": "show what an adapter folder holds",
    "env": "print versions, the GPU, and what is available and why not",
}


class Command(Protocol):
    """What a sub-command's module exports."""

    def add_parser(self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Add this sub-command with its arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it and return the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 good, 1 a check failed, 2 wrong usage."""
    argv = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        # What a terminal cannot show is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    name = next((word for word in argv if not word.startswith("-")), None)
    # Only the module that was asked for is imported: `loraplex --help` needs no torch model code.
    module = _load(name) if name in COMMANDS else None
    args = _parser(name, module).parse_args(argv)
    if module is None:
        _parser(None, None).print_help()
        return 2
    try:
        code = module.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of a pipe went away (`loraplex env | head`): nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (LoraplexError, ValueError, OSError, ImportError) as error:
        if env.is_debug():
            raise
        print(f"loraplex {name}: {_one_line(error)}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if env.is_debug() or not _is_out_of_memory(error):
            raise
        first = str(error).partition("\n")[0]
        print(f"loraplex {name}: not enough memory. {first}".strip(), file=sys.stderr)
        return 2


def _load(name: str) -> Command:
    return cast(Command, importlib.import_module(f"loraplex.cli.{name}"))


def _parser(name: str | None, module: Command | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loraplex",
        description="One base model, hundreds of LoRA adapters, the speed of the base model alone.",
        epilog="Exit codes: 0 good, 1 a check failed, 2 wrong usage or input.",
    )
    parser.add_argument("--version", action="version", version=f"loraplex {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for other, summary in COMMANDS.items():
        if other == name and module is not None:
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(other, help=summary)
    return parser


def _is_out_of_memory(error: BaseException) -> bool:
    """torch says so with a class of its own on a GPU, and with a sentence on the host."""
    text = str(error)
    return (
        isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__
