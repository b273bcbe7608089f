"""What the plugin takes for granted in SGLang's sources, and a check of it that imports nothing.

The same check runs when SGLang starts, in ``loraplex env``, and in the tests against the sources of
a release. It reads the files as text, so it needs neither SGLang's dependencies nor a GPU.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loraplex.engines.sglang.expected import EXPECTED, Expected


@dataclass(frozen=True)
class Found:
    """One name in a file: its parameters if it is a function, and its code in one spelling."""

    parameters: tuple[str, ...] | None
    code: str


def find_problems(package: Path) -> list[str]:
    """Where the sources in ``package`` (the folder ``sglang``) differ from what is expected.

    Returns:
        One line per difference; empty if the plugin fits.
    """
    problems: list[str] = []
    names: dict[str, dict[str, Found]] = {}
    for want in EXPECTED:
        if want.file not in names:
            try:
                names[want.file] = dict(_names(ast.parse((package / want.file).read_text())))
            except (OSError, SyntaxError, ValueError) as error:
                names[want.file] = {}
                problems.append(f"{want.file} cannot be read: {type(error).__name__}")
        if names[want.file]:
            problems += _differences(want, names[want.file].get(want.name))
    return problems


def _differences(want: Expected, found: Found | None) -> Iterator[str]:
    if found is None:
        yield f"{want.file} has no {want.name}"
        return
    if want.parameters is not None and found.parameters != want.parameters:
        now = "is no function" if found.parameters is None else f"takes {found.parameters}"
        yield f"{want.file}: {want.name} {now}, expected {want.parameters}"
    for line in want.code:
        if line not in found.code:
            yield f"{want.file}: {want.name} no longer says `{line}`"


def _names(tree: ast.Module) -> Iterator[tuple[str, Found]]:
    """Everything that a module or one of its classes defines, assigned through self too."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, Found(None, "")
            for member in node.body:
                for name, found in _defined(member):
                    yield f"{node.name}.{name}", found
                for name in _own_attributes(member):
                    yield f"{node.name}.{name}", Found(None, "")
        else:
            yield from _defined(node)


def _defined(node: ast.stmt) -> Iterator[tuple[str, Found]]:
    if isinstance(node, ast.FunctionDef):
        yield node.name, Found(_parameters(node.args), ast.unparse(node))
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, Found(None, ast.unparse(node))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, Found(None, ast.unparse(node))
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, Found(None, "")


def _parameters(args: ast.arguments) -> tuple[str, ...]:
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    if args.vararg or args.kwonlyargs:
        names.append("*" + (args.vararg.arg if args.vararg else ""))
    names += [arg.arg for arg in args.kwonlyargs]
    return (*names, *([f"**{args.kwarg.arg}"] if args.kwarg else []))


def _own_attributes(node: ast.stmt) -> Iterator[str]:
    """``x`` for every ``self.x = ...`` inside a method."""
    if not isinstance(node, ast.FunctionDef):
        return
    for inner in ast.walk(node):
        if not isinstance(inner, ast.Attribute) or not isinstance(inner.ctx, ast.Store):
            continue
        if isinstance(inner.value, ast.Name) and inner.value.id == "self":
            yield inner.attr
