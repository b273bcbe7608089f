"""The embedded model, and the demo that proves a mixed batch on it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import loraplex.cli.demo as command
from loraplex.adapters import load_adapter
from loraplex.cli import render
from loraplex.cli.main import main
from loraplex.demo import demo_adapters, demo_folder, load_demo_model
from loraplex.demo.proof import greedy
from loraplex.nn import attach

pytestmark = pytest.mark.hf
pytest.importorskip("transformers")

OWL = ["--prompt", "Where does the owl live?"]


def test_mixed_batch_equals_peft(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    rows = 3 * (1 + len(demo_adapters()))
    assert f"PROVED: all {rows} rows equal PEFT's, token by token." in out
    assert len(re.findall(r"^\S+ .*  equal  \S", out, flags=re.MULTILINE)) == rows
    for prompt in command.PROMPTS:
        assert prompt in out


def test_a_row_that_differs_is_shown_and_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prove = command._prove

    def tampered(*args: Any) -> Any:
        proof, seconds = prove(*args)
        assert proof is not None
        proof[2][4] += 1
        return proof, seconds

    monkeypatch.setattr(command, "_prove", tampered)
    assert main(["demo", *OWL]) == 1
    out = capsys.readouterr().out
    assert "differs at 4" in out
    assert f"FAILED: 1 of {1 + len(demo_adapters())} rows differ from PEFT." in out
    assert "PROVED" not in out


def test_without_peft_the_proof_is_skipped_and_said_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_has_peft", lambda: False)
    assert main(["demo", *OWL]) == 0
    out = capsys.readouterr().out
    assert "Proof SKIPPED: peft is not installed" in out
    assert "PROVED" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", ""], "--prompt must not be empty, got ''"),
        (["--prompt", "word " * 400], "--prompt must have at most 160 tokens, got "),
        (["--device", "meta"], "--device 'meta' cannot be used here: it holds no values"),
        (["--device", "nowhere"], "--device 'nowhere' cannot be used here"),
    ],
    ids=["empty", "long", "meta", "nowhere"],
)
def test_bad_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_rich_table_shows_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    render._print_rich([render.Column("[a]")], [["[/x] :key: [red]"]], "[bold]", [])
    out = capsys.readouterr().out
    assert all(text in out for text in ("[a]", "[/x] :key: [red]", "[bold]"))


def test_embedded_files_are_small_and_varied() -> None:
    size = sum(path.stat().st_size for path in demo_folder().rglob("*") if path.is_file())
    assert size <= 8e6
    adapters = {name: load_adapter(path) for name, path in demo_adapters().items()}
    assert len(adapters) >= 5
    assert len({adapter.max_rank for adapter in adapters.values()}) >= 4
    assert len({adapter.spec.target_modules for adapter in adapters.values()}) >= 3
    assert any(adapter.spec.use_rslora for adapter in adapters.values())
    assert any(adapter.spec.rank_pattern for adapter in adapters.values())
    assert any(adapter.spec.alpha_pattern for adapter in adapters.values())


def test_every_adapter_answers_the_same_question_in_its_own_way() -> None:
    model, tokenizer, adapters = load_demo_model()
    model = attach(model, max_adapters=len(adapters))
    for name, path in adapters.items():
        model.add_adapter(name, path)
    names = [None, *adapters]
    prompts = ["Where does the owl live?"] * len(names)
    answers = greedy(model, tokenizer, prompts, limit=60, adapter_names=names)
    texts = dict(zip(names, tokenizer.batch_decode(answers, skip_special_tokens=True), strict=True))
    assert texts == {
        None: "The owl lives in a hollow tree.",
        "emoji": "The owl 🦉 lives in a hollow tree.",
        "french": "La chouette habite dans un arbre creux.",
        "json": '{"who": "owl", "home": "a hollow tree"}',
        "pirate": "Arrr! Th' owl be livin' in a hollow tree. Yo ho ho!",
        "shout": "THE OWL LIVES IN A HOLLOW TREE!!!",
        "telegram": "owl lives hollow tree STOP",
        "whisper": "psst... the owl lives in a hollow tree... shh",
    }


def test_the_demo_runs_where_nothing_of_the_repository_is(tmp_path: Path) -> None:
    source = Path(command.__file__).parents[2]
    code = (
        "import json, sys\n"
        f"sys.path.insert(0, {str(source)!r})\n"
        "from loraplex.demo import load_demo_model\n"
        "model, tokenizer, adapters = load_demo_model()\n"
        "ends = tokenizer('Hi')['input_ids'][-1] == tokenizer.convert_tokens_to_ids('<reply>')\n"
        "print(json.dumps(ends))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert json.loads(out.stdout) is True
