"""Where the embedded model lies, and how it is loaded."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from loraplex.errors import LoraplexError

NAME = "loraplex-demo"


def demo_folder() -> Path:
    """The folder with ``loraplex-demo/`` and ``adapters/`` inside the installed package.

    Raises:
        LoraplexError: the package is imported from an archive, or was built without its data.
    """
    folder = files("loraplex.demo").joinpath("data")
    if not isinstance(folder, Path) or not (folder / NAME / "config.json").is_file():
        raise LoraplexError(f"the embedded model is missing from this installation ({folder})")
    return folder


def demo_adapters() -> dict[str, Path]:
    """The PEFT folder of each embedded adapter, by name.

    Example:
        >>> sorted(demo_adapters())
        ['emoji', 'french', 'json', 'pirate', 'shout', 'telegram', 'whisper']
    """
    return {path.name: path for path in sorted((demo_folder() / "adapters").iterdir())}


def load_demo_model(
    *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Any, Any, dict[str, Path]]:
    """Load the embedded base model, its tokenizer, and the folders of its adapters.

    The tokenizer turns a question into ``<s> question <reply>``, so that ``generate`` answers it.

    Raises:
        ImportError: transformers is not installed.
    """
    from loraplex.engines.transformers import load_model

    model, tokenizer = load_model(demo_folder() / NAME, dtype=dtype, device=torch.device(device))
    return model, tokenizer, demo_adapters()
