"""Whether vLLM's sources still say what the plugin takes for granted; nothing is imported.

The same check runs when vLLM starts, in ``loraplex env``, and in the tests against the sources of a
release. It reads the files as text, so it needs neither vLLM's dependencies nor a GPU.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from loraplex.engines.vllm.expected import EXPECTED, Expected


def find_problems(package: Path) -> list[str]:
    """Where the sources in ``package`` (the folder ``vllm``) differ from what is expected.

    Returns:
        One line per difference; empty if the plugin fits.
    """
    trees: dict[str, ast.Module] = {}
    problems: list[str] = []
    for want in EXPECTED:
        found = [file for file in want.files if (package / file).is_file()]
        if not found:
            problems.append(f"there is no {want.files[-1]}")
            continue
        file = found[0]
        try:
            tree = trees.setdefault(file, ast.parse((package / file).read_text("utf-8")))
        except (OSError, SyntaxError, ValueError) as error:
            problems.append(f"{file} cannot be read: {type(error).__name__}")
            continue
        problems += [f"{file}: {problem}" for problem in _differences(want, tree)]
    return list(dict.fromkeys(problems))


def _differences(want: Expected, tree: ast.Module) -> Iterator[str]:
    node = _find(tree, want.name)
    if node is None:
        yield f"{want.name} is gone"
        return
    if want.parameters is not None:
        now = parameters(node) if isinstance(node, ast.FunctionDef) else ()
        if now != want.parameters:
            yield f"{want.name} takes {now}, expected {want.parameters}"
    text = ast.unparse(node)
    for line in want.says:
        if line not in text:
            yield f"{want.name} no longer says `{line}`"
    for line in want.never_says:
        if line in text:
            yield f"{want.name} says `{line}`"


def _find(tree: ast.Module, name: str) -> ast.stmt | None:
    """The class, function or assignment that a dotted name leads to."""
    body: list[ast.stmt] = tree.body
    node: ast.stmt | None = None
    for part in name.split("."):
        # the last definition is the one that counts, after overloads
        node = next((one for one in reversed(body) if _name_of(one) == part), None)
        if node is None:
            return None
        body = node.body if isinstance(node, ast.ClassDef) else []
    return node


def _name_of(node: ast.stmt) -> str | None:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return node.name
    target: ast.expr | None = None
    if isinstance(node, ast.AnnAssign):
        target = node.target
    elif isinstance(node, ast.Assign):
        target = node.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def parameters(node: ast.FunctionDef) -> tuple[str, ...]:
    """Names of a function's parameters, with their stars."""
    args = node.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    if args.vararg:
        names.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        names.append("*")
    names += [arg.arg for arg in args.kwonlyargs]
    return (*names, *([f"**{args.kwarg.arg}"] if args.kwarg else []))
