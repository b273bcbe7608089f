"""The one place that reads environment variables and asks what the machine can do.

| variable | meaning |
| --- | --- |
| ``TRITON_INTERPRET=1`` | run Triton kernels in Triton's interpreter (set before the import) |
| ``LORAPLEX_DEBUG=1`` | check the range of routing indices on the GPU too (synchronises) |
| ``LORAPLEX_TUNING_DIR`` | folder of tuning tables that are read before the ones in the package |
| ``LORAPLEX_COMMIT`` | commit named in result files where git cannot tell it |
| ``LORAPLEX=1`` | let vLLM's LoRA run on loraplex (:mod:`loraplex.engines.vllm`) |
| ``SGLANG_PLUGINS``, ``VLLM_PLUGINS`` | read for ``loraplex env``: plugins an engine may load |

Unset, ``LORAPLEX_TUNING_DIR`` is ``loraplex/tuning`` under ``XDG_DATA_HOME`` or ``~/.local/share``,
where ``loraplex tune`` writes; set to nothing, there is no such folder.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import torch


@functools.cache
def is_interpreting() -> bool:
    """Whether Triton kernels run in the interpreter; settled by the first call."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def use_interpreter() -> None:
    """Run Triton kernels in the interpreter from here on.

    Raises:
        RuntimeError: if triton was imported without it; its functions are compiled ones then.
    """
    if is_interpreting():
        return
    if "triton" in sys.modules:
        raise RuntimeError("Triton's interpreter must be chosen before triton is imported")
    os.environ["TRITON_INTERPRET"] = "1"
    is_interpreting.cache_clear()


def is_debug() -> bool:
    """Whether to run checks that cost a host synchronisation."""
    return os.environ.get("LORAPLEX_DEBUG", "0").lower() in ("1", "true", "yes", "on")


def tuning_dir() -> Path | None:
    """Folder of the user's own tuning tables; None if ``LORAPLEX_TUNING_DIR`` is set to nothing."""
    value = os.environ.get("LORAPLEX_TUNING_DIR")
    if value is not None:
        return Path(value) if value else None
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(data) / "loraplex" / "tuning"


def commit() -> str:
    """The commit that whoever copied this tree says it is, or an empty string."""
    return os.environ.get("LORAPLEX_COMMIT", "")


def is_plugin_wanted() -> bool:
    """Whether ``LORAPLEX`` switches the plugin of an engine on that has no option of its own."""
    return os.environ.get("LORAPLEX", "0").lower() in ("1", "true", "yes", "on")


def plugin_names(variable: str) -> list[str] | None:
    """The names in a serving engine's list of allowed plugins; None if the variable is not set."""
    value = os.environ.get(variable)
    return None if value is None else [name.strip() for name in value.split(",") if name.strip()]


@functools.cache
def has_triton() -> bool:
    """Whether triton can be imported."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def gpu_arch(index: int) -> str:
    """Architecture of one GPU as the tuning tables spell it: ``sm_90``, ``gfx942``."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


@functools.cache
def num_multiprocessors(index: int) -> int:
    """Number of multiprocessors of one GPU."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
