"""What result files begin with."""

from __future__ import annotations

import datetime
import subprocess

import pytest

from loraplex.bench import header


def test_header_says_where_and_how() -> None:
    found = header.make_header(["loraplex", "bench", "steps", "--json", "a file.json"])
    assert found["command"] == "loraplex bench steps --json 'a file.json'"
    assert all(found.values())
    date = datetime.datetime.fromisoformat(found["date"])
    age = datetime.datetime.now(datetime.timezone.utc) - date
    assert abs(age.total_seconds()) < 60


def test_commit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_COMMIT", "0123abc")
    assert header.commit() == "0123abc"


def test_commit_from_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAPLEX_COMMIT", raising=False)
    answers = {"rev-parse": "0123456789ab\n", "status": ""}

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, answers[command[1]], "")

    monkeypatch.setattr(subprocess, "run", run)
    assert header.commit() == "0123456789ab"
    answers["status"] = " M ops/matmul.py\n"
    assert header.commit() == "0123456789ab+dirty"


def test_commit_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAPLEX_COMMIT", raising=False)

    def run(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", run)
    assert header.commit() == "unknown"


def test_version_of_what_is_not_installed() -> None:
    assert header.package_version("no-such-package-at-all") is None
    assert header.package_version("torch")
