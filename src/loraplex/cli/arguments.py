"""What several sub-commands take: whole numbers, and files that hold results in the end."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

PICTURES = ("png", "svg", "pdf")
MOST = 2**31 - 1


def whole(minimum: int, maximum: int = MOST) -> Callable[[str], int]:
    """A type for argparse: whole numbers from ``minimum`` to ``maximum``.

    Example:
        >>> whole(1)("64")
        64
    """

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            most = "" if maximum == MOST else f" to {maximum}"
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {minimum}{most}, got {text!r}"
            )
        return value

    return parse


def check_file(name: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold.

    Raises:
        ValueError: naming the argument; nothing is created.
    """
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{name} must be a file, got the folder {str(path)!r}")
    _check_room(name, path, path.parent)


def check_folder(name: str, path: Path | None) -> None:
    """Refuse a folder that cannot be made or written, as :func:`check_file` does with a file."""
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise ValueError(f"{name} must be a folder, got the file {str(path)!r}")
    _check_room(name, path, path)


def check_picture(name: str, path: Path | None) -> None:
    """Refuse a picture that cannot be drawn or written, as :func:`check_file` does with a file.

    Raises:
        ValueError: as there, or a format that is not among ``PICTURES``.
        ImportError: matplotlib is not installed (extra ``bench``).
    """
    if path is None:
        return
    if path.suffix.removeprefix(".").lower() not in PICTURES:
        raise ValueError(f"{name} must end in .{', .'.join(PICTURES)}, got {str(path)!r}")
    check_file(name, path)
    check_matplotlib(name)


def check_matplotlib(name: str) -> None:
    """Refuse to draw without matplotlib.

    Raises:
        ImportError: naming the extra.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{name} needs matplotlib: pip install 'loraplex[bench]'") from error


def _check_room(name: str, path: Path, folder: Path) -> None:
    """Folders that are missing are made later; the first that is there must take them."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    target = path if path.exists() else folder
    if not folder.is_dir() or not os.access(target, os.W_OK):
        raise ValueError(f"{name} must be in a folder that can be written, got {str(path)!r}")
