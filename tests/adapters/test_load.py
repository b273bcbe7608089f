"""Arguments of ``load_adapter`` that are refused before any file is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraplex import load_adapter


class BytesPath:
    """PathLike, but of bytes."""

    def __fspath__(self) -> bytes:
        return b"folder"


NO_PATHS = (3, b"folder", ["folder"], BytesPath())


@pytest.mark.parametrize(
    ("name", "value"),
    [("path", None), *((name, value) for name in ("path", "root") for value in NO_PATHS)],
)
def test_what_is_no_path_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    arguments = {"path": str(tmp_path), name: value}
    with pytest.raises(TypeError, match=rf"^{name} must be a str or PathLike\[str\], got "):
        load_adapter(**arguments)


def test_a_root_that_no_file_name_can_spell_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^root must be a path of .*, got '.ud800'") as caught:
        load_adapter("x", root="\ud800")
    assert type(caught.value) is ValueError


def test_a_root_with_a_nul_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^root must be a path without NUL, got 'a.x00b'"):
        load_adapter("x", root="a\0b")


@pytest.mark.parametrize("name", ["strict", "allow_modified_base"])
@pytest.mark.parametrize("value", ["no", None, 1], ids=repr)
def test_a_switch_is_true_or_false(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be True or False, got {value!r}"):
        load_adapter(tmp_path, **{name: value})
