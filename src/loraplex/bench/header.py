"""What every result file begins with: on what, with what, from which commit, by which command."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from loraplex import env
from loraplex.version import __version__


def make_header(command: list[str] | None = None) -> dict[str, str]:
    """Machine, versions, commit, command and date, as strings in a fixed order.

    Args:
        command: the words of the command line; those of this process if None.
    """
    words = ["loraplex", *sys.argv[1:]] if command is None else command
    return {
        "device": device_name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip or "none",
        "triton": package_version("triton") or "none",
        "python": platform.python_version(),
        "loraplex": __version__,
        "commit": commit(),
        "command": shlex.join(words),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def device_name() -> str:
    """The GPU's name, or the CPU's with the number of threads torch uses."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def driver_version() -> str:
    """The GPU driver's version, "none" without a GPU, "unknown" where nothing tells."""
    if not torch.cuda.is_available():
        return "none"
    tool = shutil.which("nvidia-smi")
    if tool:
        query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        found = _output_of(query, Path.cwd())
        if found:
            return found.splitlines()[0].strip()
    proc = Path("/proc/driver/nvidia/version")
    if proc.exists():
        return " ".join(proc.read_text().splitlines()[0].split())
    return "unknown"


def commit() -> str:
    """The commit of the source: ``LORAPLEX_COMMIT``, else git's answer (+dirty), else "unknown"."""
    given = env.commit()
    if given:
        return given
    source = Path(__file__).resolve().parent
    # An installed copy may lie inside somebody else's repository (a project's .venv).
    if source.parts[-3:-1] != ("src", "loraplex"):
        return "unknown"
    head = _output_of(["git", "rev-parse", "--short=12", "HEAD"], source)
    if not head:
        return "unknown"
    changed = _output_of(["git", "status", "--porcelain", "--", "."], source.parent)
    return f"{head}+dirty" if changed else head


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output_of(command: list[str], where: Path) -> str:
    try:
        done = subprocess.run(
            command, cwd=where, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
