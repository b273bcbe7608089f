"""``loraplex check`` passes here, and fails when something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loraplex.bench import cases
from loraplex.bench.cases import Case, Inputs
from loraplex.cli import check
from loraplex.cli.main import main


def test_check_passes_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "check.json"
    assert main(["check", "--cases", "10", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    content = json.loads(path.read_text())
    assert f"{content['cases']} of {content['cases']} results are right" in out
    assert content["failed"] == 0
    assert {"device", "torch", "triton", "commit", "command", "date"} <= content["header"].keys()
    four = {g["impl"]: g for g in content["groups"] if "four tokens" in g["op"]}
    assert {"torch", "auto", "one_launch", "shrink_expand"} <= four.keys()
    assert all(group["cases"] == 1 for group in four.values())
    assert {g["op"] for g in content["groups"]} >= set(cases.OPS)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda result: result.flatten()[0].mul_(1.5).add_(1), "largest error"),
        (lambda result: result.flatten()[-1].fill_(torch.nan), "WRONG"),
    ],
    ids=["one value", "NaN"],
)
def test_check_fails_on_a_wrong_result(
    spoil: object,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def compute(case: Case, inputs: Inputs, impl: str) -> Tensor:
        result = cases.compute(case, inputs, impl)
        assert callable(spoil)
        spoil(result)
        return result

    monkeypatch.setattr(check, "compute", compute)
    assert main(["check", "--cases", "0"]) == 1
    out = capsys.readouterr().out
    assert "FAILED torch: multi_lora float32" in out
    assert complaint in out


def test_check_sees_a_base_row_that_is_off_by_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(
        "multi_lora", 6, 32, (32,), (8, 8), "uniform", 0.5, torch.float32, torch.int64, seed=3
    )
    inputs = cases.make_inputs(case, torch.device("cpu"))
    result = cases.compute(case, inputs, "torch")
    assert check.complain_of_base_rows(case, inputs, result, "torch") == ""
    row = int((inputs.indices < 0).nonzero()[0])
    result[row, 0] = 1e-30
    assert "index -1" in check.complain_of_base_rows(case, inputs, result, "torch")


def test_an_exception_is_a_failure_and_a_refusal_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from loraplex import UnsupportedImplError

    def compute(case: Case, inputs: Inputs, impl: str) -> Tensor:
        if impl == "one_launch":
            raise UnsupportedImplError("not for me")
        if impl == "shrink_expand":
            raise RuntimeError("illegal memory access")
        return cases.compute(case, inputs, impl)

    monkeypatch.setattr(check, "compute", compute)
    assert main(["check", "--cases", "0"]) == 1
    out = capsys.readouterr().out
    assert "FAILED shrink_expand: multi_lora" in out
    assert "illegal memory access" in out
    assert "FAILED one_launch" not in out


def test_a_file_that_cannot_be_written_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "check_case", None)
    assert main(["check", "--json", str(tmp_path)]) == 2
    assert "--json must be a file, got the folder" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["-1", "1.5", "99999999999"])
def test_bad_number_of_cases(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["check", "--cases", count])
    assert stop.value.code == 2
    message = f"--cases: must be a whole number from 0 to 1000000, got {count!r}"
    assert message in capsys.readouterr().err
