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
    b'{"prompt": "a", "adapter": "\\ud800"}': "adapter is '\\ud800'",
    b'{"prompt": "a", "id": NaN}': "not valid JSON: NaN is no JSON number",
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


def test_an_id_that_is_no_text_comes_back_and_loses_nothing(tmp_path: Path) -> None:
    lines = [
        b'{"prompt": "a", "max_new_tokens": 1, "id": "\\ud800"}',
        b'{"prompt": "a", "max_new_tokens": 1, "id": "\xc3\xa9"}',
    ]
    code, records = run(tmp_path, lines)
    assert (code, [record["id"] for record in records]) == (0, ["\ud800", "\u00e9"])


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
        (["--device", "meta"], "--device 'meta' cannot be used here: it holds no values"),
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


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x"])
def test_a_batch_size_that_is_none(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, [b'{"prompt": "a"}'], f"--batch-size={value}")
    assert f"--batch-size: must be a whole number from 1, got {value!r}" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("out", "said"),
    [("missing/out.jsonl", "must be in a folder that exists"), (".", "must be a file, got the")],
)
def test_where_nothing_can_be_written_is_refused_before_the_model_is_loaded(
    out: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("loraplex.cli.generate._load", None)  # calling it would be a TypeError
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt": "a"}\n')
    path = str(tmp_path / out)
    argv = ["generate", "--model", "demo", "--requests", str(requests), "--out", path]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert f"--out {said}" in error
    assert path in error
    assert sorted(tmp_path.iterdir()) == [requests]


def test_a_generator_refuses_more_than_it_was_made_for() -> None:
    from loraplex.demo import load_demo_model

    model, tokenizer, adapters = load_demo_model()
    generator = Generator(model, tokenizer, {"shout": adapters["shout"]}, max_batch=2)
    assert generator.run([]) == []
    with pytest.raises(ValueError, match="at most 2, got 3"):
        generator.run([Request("a")] * 3)


@pytest.fixture
def short_model(tmp_path: Path) -> Path:
    """A GPT-2 whose learned positions end at 64, as a folder."""
    import torch
    import transformers

    from loraplex.demo import NAME, demo_folder

    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_folder() / NAME)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=1, n_head=2,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_a_long_prompt_beside_a_long_answer(short_model: Path, tmp_path: Path) -> None:
    long_prompt = {"prompt": "owl " * 50, "max_new_tokens": 3}
    long_answer = {"prompt": "owl", "max_new_tokens": 50}
    lines = [json.dumps(request).encode() for request in (long_prompt, long_answer) * 2]
    together = run(tmp_path, lines, "--model", str(short_model))
    assert together == run(tmp_path, lines, "--model", str(short_model), "--batch-size", "1")
    assert together[0] == 0
    assert [record["tokens"] <= 50 for record in together[1]] == [True] * 4


@pytest.mark.parametrize(
    ("file", "content"), [("model.safetensors", b"\x08"), ("config.json", b"[]")]
)
def test_a_broken_model_is_one_line_and_code_2(
    file: str, content: bytes, short_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (short_model / file).write_bytes(content)
    capsys.readouterr()
    code, records = run(tmp_path, [b'{"prompt": "a"}'], "--model", str(short_model))
    assert (code, records) == (2, [])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--model {short_model} cannot be loaded" in line
