"""Repeated calls launch what the long way launches, whatever differs between calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"

pytestmark = pytest.mark.compile


def test_repeated_calls_launch_the_same(request: pytest.FixtureRequest) -> None:
    assert request.config.cache is not None
    cache_dir = request.config.cache.mkdir("triton")
    paths = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / "repeat_calls.py")],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(cache_dir)},
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [f"{one['way']}, {one['case']}: {one['complaint']}" for one in told if one["complaint"]]
    assert not wrong, "\n".join(wrong)
    assert done.returncode == 0, done.stderr
    assert {one["way"] for one in told} == {"shipped", "specialized", "single"}
