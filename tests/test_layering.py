"""Who may import whom: docs/structure.md has the table, these tests keep it true."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "loraplex"
OPTIONAL = {"transformers", "peft", "rich", "matplotlib", "prometheus_client", "vllm", "sglang"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150


@dataclass(frozen=True)
class Import:
    """One import statement: the dotted name, where, and whether a function has to run first."""

    name: str
    place: str
    is_lazy: bool


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """``errors`` for errors.py, ``ops`` for anything in ops/, ``__init__`` for the top."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def allowed_imports() -> dict[str, set[str]]:
    """The table of docs/structure.md: room -> rooms it may import."""
    text = (ROOT / "docs" / "structure.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \|([^|]*)\|$", text, flags=re.MULTILINE)
    return {room: set(re.findall(r"`(\w+)`", others)) for room, others in rows}


def imports_of(tree: ast.AST, path: str, *, is_lazy: bool = False) -> Iterator[Import]:
    """Every import below a node; those that only type checkers see are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        place = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, place, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place}: relative import; write the whole name"
            # `from loraplex import env` imports the room env
            yield from (
                Import(f"{node.module}.{alias.name}", place, is_lazy) for alias in node.names
            )
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_of(node, path, is_lazy=is_lazy or is_function)


def all_imports(path: Path) -> list[Import]:
    tree = ast.parse(path.read_text(), filename=str(path))
    return list(imports_of(tree, str(path.relative_to(ROOT))))


def wrong_rooms(room: str, imports: list[Import], allowed: dict[str, set[str]]) -> list[str]:
    """Imports of another room that the table does not name."""
    found = []
    for one in imports:
        package, _, rest = one.name.partition(".")
        other = rest.partition(".")[0] or "loraplex"
        if package == "loraplex" and other != room and other not in allowed[room]:
            found.append(f"{one.place}: {room} may not import {one.name}")
    return found


def wrong_packages(path: Path, imports: list[Import]) -> list[str]:
    """Optional packages and triton at import time, outside the rooms that are made of them."""
    parts = path.relative_to(PACKAGE).parts
    found = []
    for one in imports:
        package = one.name.partition(".")[0]
        is_at_home = parts[0] == "engines" and package in parts
        if package in OPTIONAL and not one.is_lazy and not is_at_home:
            found.append(f"{one.place}: import {package} inside the function that needs it")
        if package == "triton" and not one.is_lazy and parts[0] != "kernels":
            found.append(f"{one.place}: triton may be imported at the top of kernels/ only")
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    room, imports = room_of(path), all_imports(path)
    assert wrong_packages(path, imports) == []
    if room in ("__init__", "__main__"):
        return
    allowed = allowed_imports()
    assert room in allowed, f"docs/structure.md has no row for the room {room}"
    assert wrong_rooms(room, imports, allowed) == []


def test_table_has_no_cycle() -> None:
    allowed = {room: others - {"loraplex"} for room, others in allowed_imports().items()}
    assert set().union(*allowed.values()) <= allowed.keys()
    done: set[str] = set()
    while len(done) < len(allowed):
        free = {room for room, others in allowed.items() if others <= done} - done
        assert free, f"rooms that import each other: {sorted(allowed.keys() - done)}"
        done |= free


def test_every_room_of_the_table_exists() -> None:
    rooms = {room_of(path) for path in files()}
    assert allowed_imports().keys() - rooms == set()


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("reference", "from loraplex.ops import lora_linear"),
        ("reference", "from loraplex import ops"),
        ("reference", "import loraplex.ops.impls"),
        ("adapters", "def f():\n    from loraplex.pool import AdapterPool"),
        ("kernels", "import loraplex"),
    ],
)
def test_rule_sees_a_wrong_import(room: str, source: str) -> None:
    imports = list(imports_of(ast.parse(source), "x.py"))
    assert len(wrong_rooms(room, imports, allowed_imports())) == 1


def test_rule_sees_optional_packages_at_import_time() -> None:
    eager = list(imports_of(ast.parse("import transformers"), "x.py"))
    lazy = list(imports_of(ast.parse("def f():\n    import transformers"), "x.py"))
    assert len(wrong_packages(PACKAGE / "nn" / "x.py", eager)) == 1
    assert wrong_packages(PACKAGE / "nn" / "x.py", lazy) == []
    assert wrong_packages(PACKAGE / "engines" / "transformers" / "x.py", eager) == []


def test_environment_is_read_in_one_place() -> None:
    readers = [
        str(path.relative_to(PACKAGE))
        for path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name | ast.alias)
        and {"environ", "getenv"} & {getattr(node, f, "") for f in ("attr", "id", "name")}
    ]
    assert set(readers) <= {"env.py"}


IMPORT_PROBE = """
import os, sys
import torch

readers = []
read = os._Environ.__getitem__

def watched_read(self, key):
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] in ("os", "collections.abc", "_collections_abc"):
        frame = frame.f_back
    readers.append(frame.f_globals["__name__"])
    return read(self, key)

os._Environ.__getitem__ = watched_read
import loraplex
assert not [r for r in readers if r.startswith("loraplex")], f"environment read by {readers}"
os.environ.get("HOME")
assert readers[-1] == "__main__", "the watch does not see reads"

loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & OPTIONAL, f"import loraplex loaded {loaded & OPTIONAL}"
assert not torch.cuda.is_initialized(), "import loraplex initialised CUDA"
print("quiet")
"""


def test_import_does_no_work() -> None:
    probe = f"OPTIONAL = {OPTIONAL!r}\n{IMPORT_PROBE}"
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "quiet"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_are_small(path: Path) -> None:
    text = path.read_text()
    assert path.stem not in ("utils", "util", "helpers", "common", "misc")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    limit = MAX_KERNEL_LINES if room_of(path) == "kernels" else MAX_FUNCTION_LINES
    long = [
        f"{node.name}: {length(node)} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and length(node) > limit
    ]
    assert long == []


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body; its signature and its docstring are free."""
    first = node.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    start = (first.end_lineno or 0) + 1 if is_docstring else first.lineno
    return (node.end_lineno or 0) - start + 1
