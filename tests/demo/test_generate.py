"""``loraplex generate``: every request gets an answer or an error of its own, in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.cli.main import main
from loraplex.engines.transformers import Generator, Request, RequestError, parse_request

pytestmark = pytest.mark.hf
pytest.importorskip("transformers")

OWL = "Where does the owl live?"
GOOD: list[dict[str, Any]] = [
    {"prompt": OWL, "adapter": "shout"},
    {"prompt": OWL, "adapter": None, "max_new_tokens": 3, "id": "short"},
    {"prompt": "What is a key for?", "adapter": "whisper"},
    {"prompt": "Describe the lion.", "adapter": "french"},
    {"prompt": OWL},
]
ANSWERS = [
    "THE OWL LIVES IN A HOLLOW TREE!!!",
    "The owl lives",
    "psst... with a key you can open a door... shh",
    "Le lion est courageux. Il y a du riz épicé dans une tente dorée. "
    "Chaque jour, le lion raconte des blagues.",
    "The owl lives in a hollow tree.",
]


def run(tmp_path: Path, lines: list[bytes], *options: str) -> tuple[int, list[dict[str, Any]]]:
    requests, out = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(b"\n".join(lines) + b"\n")
    argv = ["generate", "--model", "demo", "--requests", str(requests), "--out", str(out)]
    code = main([*argv, "--dtype", "float32", *options])
    text = out.read_text(encoding="utf-8") if out.exists() else ""
    return code, [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_answers_do_not_depend_on_the_batch(
    batch_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(request).encode() for request in GOOD]
    code, records = run(tmp_path, lines, "--batch-size", str(batch_size))
    assert code == 0
    assert [record["text"] for record in records] == ANSWERS
    assert [record["line"] for record in records] == [1, 2, 3, 4, 5]
    assert [record["finish"] for record in records] == ["stop", "length", "stop", "stop", "stop"]
    assert records[1]["id"] == "short"
    assert records[1]["tokens"] == 3
    tokens = sum(record["tokens"] for record in records)
    printed = capsys.readouterr()
    assert f"5 requests answered, 0 refused; {tokens} tokens" in printed.out
    assert "tokens/s" in printed.out
    assert printed.err == ""


BAD = {
    b"{": "not valid JSON",
    b'{"prompt": "caf\xe9"}': "not valid JSON",
    b"[1, 2]": "must be a JSON object, got [1, 2]",
    b'{"adapter": "shout"}': "prompt must be a string that is not empty, got null",
    b'{"prompt": ""}': 'prompt must be a string that is not empty, got ""',
    b'{"prompt": 3}': "prompt must be a string that is not empty, got 3",
    b'{"prompt": "\\ud800"}': "half of a surrogate pair",
    b'{"prompt": "a", "adapter": 3}': "adapter must be a name or null, got 3",
    b'{"prompt": "a", "adapter": "nope"}': "adapter is 'nope', the adapters are: 'emoji', 'french'",
    b'{"prompt": "a", "adapter": ""}': "adapter is ''",
    b'{"prompt": "a", "max_new_tokens": 0}': "max_new_tokens must be a whole number from 1, got 0",
    b'{"prompt": "a", "max_new_tokens": true}': "max_new_tokens must be a whole number from 1",
    b'{"prompt": "a", "max_new_tokens": 2.5}': "max_new_tokens must be a whole number from 1",
    b'{"prompt": "a", "max_new_tokens": 999}': "exceed the 256 positions of the model",
    b'{"prompt": "a", "max_tokens": 9}': "unknown field 'max_tokens'; the fields are prompt",
}


def test_bad_requests_do_not_lose_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [json.dumps(request).encode() for request in GOOD]
    lines = [good[0], *BAD, b"   ", *good[1:]]
    code, records = run(tmp_path, lines, "--batch-size", "4")
    assert code == 1
    assert [record["text"] for record in records if "text" in record] == ANSWERS
    errors = [record for record in records if "error" in record]
    assert [record["line"] for record in errors] == list(range(2, 2 + len(BAD)))
    for record, message in zip(errors, BAD.values(), strict=True):
        assert message in record["error"]
    # Order of the requests, the blank line counted but not answered.
    assert [r["line"] for r in records] == [
        n for n in range(1, len(lines) + 1) if n != 2 + len(BAD)
    ]
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [f"line {r['line']}: {r['error']}" for r in errors]
    assert f"5 requests answered, {len(BAD)} refused" in printed.out


def test_an_error_keeps_the_id_of_its_request(tmp_path: Path) -> None:
    lines = [b'{"prompt": "a", "adapter": "nope", "id": 7}', b'{"id": [1], "prompt": null}']
    _, records = run(tmp_path, lines)
    assert [record["id"] for record in records] == [7, [1]]


def test_a_broken_request_file_of_deep_json_is_one_error() -> None:
    with pytest.raises(RequestError, match="not valid JSON"):
        parse_request("[" * 100_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--adapter", "nameless"], "--adapter must be NAME=DIR, got 'nameless'"),
        (["--adapter", "a=x", "--adapter", "a=y"], "'a' is given twice"),
        (["--adapter", "a=no/such/folder"], "no/such/folder"),
        (["--adapter", "__base__=no/such/folder"], "no/such/folder"),
        (["--model", "no/such/model"], "no/such/model is not a model folder"),
        (["--device", "nonsense"], "--device 'nonsense' cannot be used here"),
        (["--requests", "no/such/file"], "no/such/file"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, records = run(tmp_path, [b'{"prompt": "a"}'], *options)
    assert (code, records) == (2, [])
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_the_file_of_the_requests_is_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt": "a"}\n')
    link = tmp_path / "link.jsonl"
    link.symlink_to(requests)
    argv = ["generate", "--model", "demo", "--requests", str(requests), "--out", str(link)]
    assert main(argv) == 2
    assert "must not be the file of the requests" in capsys.readouterr().err
    assert requests.read_text() == '{"prompt": "a"}\n'


def test_a_generator_refuses_more_than_it_was_made_for() -> None:
    from loraplex.demo import load_demo_model

    model, tokenizer, adapters = load_demo_model()
    generator = Generator(model, tokenizer, {"shout": adapters["shout"]}, max_batch=2)
    assert generator.run([]) == []
    with pytest.raises(ValueError, match="at most 2, got 3"):
        generator.run([Request("a")] * 3)
