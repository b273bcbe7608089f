"""Every kernel compiles for every supported architecture, without spills, within shared memory.

No GPU is needed: a subprocess per architecture compiles what the public ops launch (Triton's
interpreter, which the other tests use on CPU, is off there).
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
ONLY_HOPPER = {"specialized_launch_kernel"}

pytestmark = pytest.mark.compile


@pytest.fixture(scope="module")
def cache_dir(request: pytest.FixtureRequest) -> Path:
    """Compiled kernels stay between runs, in pytest's own cache."""
    assert request.config.cache is not None
    return request.config.cache.mkdir("triton")


def compile_catalog(arch: str, catalog: Path, cache_dir: Path) -> list[dict[str, Any]]:
    """What the harness says about each kernel of a catalog."""
    command = [sys.executable, str(HERE / "compile_kernels.py"), "--arch", arch]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "--catalog", str(catalog)],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(cache_dir)},
    )
    usages = [json.loads(line) for line in done.stdout.splitlines()]
    is_bad = any(usage["complaint"] for usage in usages)
    assert done.returncode == int(is_bad), done.stderr
    return usages


def kernel_names() -> set[str]:
    """Every ``*_kernel`` under kernels/ that is a jit function."""
    names = set()
    for path in (ROOT / "src" / "loraplex" / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                decorators = {ast.unparse(d).partition("(")[0] for d in node.decorator_list}
                assert decorators & {"triton.jit", "gluon.jit"}, node.name
                names.add(node.name)
    return names


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles(arch: str, cache_dir: Path) -> None:
    usages = compile_catalog(arch, HERE / "catalog.py", cache_dir)
    complaints = [f"{u['case']}, {u['kernel']}: {u['complaint']}" for u in usages if u["complaint"]]
    assert not complaints, f"{len(complaints)} kernels:\n" + "\n".join(complaints)
    wanted = kernel_names() - (set() if arch == "sm_90" else ONLY_HOPPER)
    assert {usage["kernel"] for usage in usages} == wanted
    if arch.startswith("sm_"):
        narrow = [
            f"{u['case']}, {u['kernel']}" for u in usages if is_vectorizable(u) and is_slow(u)
        ]
        assert not narrow, "2-byte loads where rows are dense and aligned:\n" + "\n".join(narrow)


def is_vectorizable(usage: Mapping[str, Any]) -> bool:
    """Whether a case promises dense, aligned rows to a kernel that streams weights."""
    streams = {
        "shrink_kernel", "shrink_wide_kernel", "expand_kernel", "lora_linear_kernel",
        "single_launch_kernel", "specialized_launch_kernel",
    }  # fmt: skip
    is_odd = usage["case"].endswith("odd") or "float32" in usage["case"]
    # which reads its biases one by one
    if usage["kernel"] == "specialized_launch_kernel":
        is_odd = usage["case"].endswith("dora")
    return usage["kernel"] in streams and not is_odd


def is_slow(usage: Mapping[str, Any]) -> bool:
    """Whether the promise was lost on the way to the loads (seen once: three times the time)."""
    return usage["narrow_loads"] > 0 or usage["wide_copies"] == 0


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_harness_tells_good_from_bad(arch: str, cache_dir: Path) -> None:
    usages = compile_catalog(arch, HERE / "sample_catalog.py", cache_dir)
    found = {usage["case"]: usage["complaint"] for usage in usages}
    assert found["good"] == ""
    assert found["good/dot"] == ""
    assert "bytes per thread" in found["spills"]
    assert "of shared memory" in found["shared"]
    assert "CompilationError" in found["broken"]
    registers = {usage["case"]: usage["registers"] for usage in usages}
    assert 0 < registers["good"] < registers["good/dot"]


def test_there_are_kernels() -> None:
    assert {"routing_kernel", "shrink_kernel"} <= kernel_names()
