"""``loraplex inspect``: the table, the JSON, and whether adapters fit a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loraplex.cli.inspect import _size
from loraplex.cli.main import main

pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.hf


def inspect(*arguments: Any) -> int:
    return main(["inspect", *map(str, arguments)])


def save_model(kind: str, tiny: Any) -> Path:
    path: Path = tiny.folder / f"model-{kind}"
    tiny.model(kind).config.save_pretrained(path)
    return path


def as_json(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_many_folders_in_one_table(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tiny.train(with_logits=False).path
    pattern = tiny.train(
        r=8, target_modules=["q_proj", "down_proj"], rank_pattern={"q_proj": 2}, use_rslora=True,
        use_dora=True, with_logits=False,
    )  # fmt: skip
    pattern.edit_config(base_model_name_or_path="org/Tiny")
    broken = tiny.train(with_logits=False)
    broken.edit_config(r=5)
    assert inspect(plain, pattern.path, broken.path) == 1
    lines = capsys.readouterr().out.splitlines()
    heads = " ".join(lines[0].split())
    assert heads == "adapter base model rank scale targets dtype size also fits"
    assert lines[2].split() == ["adapter1", "?", "4", "4", "q_proj", "×2", "float64", "4.1", "kB"]
    assert "org/Tiny" in lines[3]
    assert "2..8  5.657..11.31  down_proj, q_proj ×2" in lines[3]
    assert "rslora, dora" in lines[3]
    assert lines[4].split() == ["adapter3", "cannot", "be", "loaded"]
    assert lines[5].startswith("adapter3: model.layers.0.self_attn.q_proj: the tensors have rank 4")


def test_json_has_every_field(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trained = tiny.train(modules_to_save=["norm"], with_logits=False)
    trained.edit_config(base_model_name_or_path="org/Tiny", foobar=1)
    assert inspect("--json", trained.path) == 0
    (report,) = as_json(capsys)
    assert report == {
        "path": str(trained.path),
        "error": None,
        "base_model": "org/Tiny",
        "peft_version": report["peft_version"],
        "ranks": [4],
        "scales": [4.0],
        "targets": {"q_proj": 2},
        "dtypes": ["float64"],
        "num_bytes": 8 * (2 * 2 * 4 * 32 + 5 * 32),
        "use_rslora": False,
        "features": ["modules_to_save"],
        "ignored": [],
        "fits": None,
        "is_partial": False,
        "why_not": None,
        "renaming": None,
        "notes": report["notes"],
    }
    assert "foobar=1" in report["notes"][0]


def test_fits_or_why_not(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [
        tiny.train(target_modules="all-linear", with_logits=False).path,
        tiny.train(target_modules=["embed_tokens", "lm_head"], with_logits=False).path,
        tiny.train("llama-odd", with_logits=False).path,
        tiny.train("gpt2", target_modules=["c_attn"], fan_in_fan_out=True, with_logits=False).path,
    ]
    bare = tiny.train("llama-bare", with_logits=False).path
    model = save_model("llama", tiny)
    assert inspect("--json", *folders, bare, "--model", model) == 1
    reports = as_json(capsys)
    assert [report["fits"] for report in reports] == [True, True, False, False, True]
    assert "lora_A has shape (4, 40)" in reports[2]["why_not"]
    assert "matched nothing" in reports[3]["why_not"]
    assert reports[4]["renaming"] == ["", "model."]

    assert inspect(*folders[:1], bare, "--model", model) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].endswith("yes")
    assert "adapter5: prefix '' in the adapter is 'model.' in the model" in out


@pytest.mark.parametrize("kind", ["gpt2", "phi3", "mixtral", "llama-tied", "qwen2"])
def test_other_models(kind: str, tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config: dict[str, Any] = {"target_modules": "all-linear"}
    if kind == "gpt2":
        config = {"target_modules": ["c_attn", "c_fc"], "bias": "all", "fan_in_fan_out": True}
    if kind == "mixtral":
        config = {"target_parameters": ["gate_up_proj", "down_proj"], "target_modules": ["q_proj"]}
    trained = tiny.train(kind, with_logits=False, **config)
    assert inspect("--json", trained.path, "--model", save_model(kind, tiny)) == 0
    assert as_json(capsys)[0]["fits"] is True


def test_split_adapter_fits_phi3(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The fused layers of Phi-3 take adapters of the same model with split projections."""
    trained = tiny.train(
        target_modules=["q_proj", "v_proj", "gate_proj", "up_proj"], with_logits=False
    )  # fmt: skip
    assert inspect("--json", trained.path, "--model", save_model("phi3", tiny)) == 0
    assert as_json(capsys)[0]["fits"] is True


def test_l50_another_base_is_visible(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trained = tiny.train(with_logits=False)
    trained.edit_config(base_model_name_or_path="org/Other")
    model = save_model("llama", tiny)
    assert inspect(trained.path, "--model", model) == 0
    out = capsys.readouterr().out
    assert f"trained on 'org/Other', the model is '{model}'" in out
    assert "org/Other" in out.splitlines()[2]


def test_nothing_in_a_folder_reaches_the_terminal_as_a_command(
    tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = tiny.train(with_logits=False)
    trained.edit_config(base_model_name_or_path="org/\x1b[2J\nadapter9", foobar="\x1b]0;title\x07")
    trained.edit_tensors(lambda t: {**t, "x\x1b[31m\n.y": t[next(iter(t))].clone()})
    assert inspect("--lenient", trained.path) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())
    assert len(out.splitlines()) == 5  # heads, rule, row, the unknown key, what was ignored
    assert "org/\\x1b[2J\\nadapter9" in out
    assert "ignored: x\\x1b[31m\\n.y" in out


def test_lenient_lists_what_it_ignores(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trained = tiny.train(modules_to_save=["lm_head"], with_logits=False)
    trained.edit_tensors(lambda t: {**t, "extra.thing": t[next(iter(t))].clone()})
    model = save_model("llama-bare", tiny)
    assert inspect(trained.path, "--model", model) == 1
    capsys.readouterr()
    assert inspect("--json", "--lenient", trained.path) == 0
    assert as_json(capsys)[0]["ignored"] == ["extra.thing"]


def test_lenient_says_what_fits_in_part_and_what_does_not_at_all(
    tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    part, nothing = tiny.train(with_logits=False), tiny.train(with_logits=False)
    part.rename("layers.1.", "layers.7.")
    nothing.rename("q_proj", "z_proj")
    model = save_model("llama", tiny)
    assert inspect("--lenient", part.path, "--model", model) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[2].endswith("in part")
    assert "ignored: model.layers.7.self_attn.q_proj" in out
    assert inspect("--lenient", "--json", part.path, nothing.path, "--model", model) == 1
    first, second = as_json(capsys)
    assert (first["fits"], first["is_partial"], first["why_not"]) == (True, True, None)
    assert second["fits"] is False
    assert "no part of the adapter matches" in second["why_not"]


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"),
     (83_886_080, "83.9 MB"), (10**9, "1 GB"), (25 * 10**11, "2.5 TB")],
)  # fmt: skip
def test_sizes_have_three_digits(num_bytes: int, shown: str) -> None:
    assert _size(num_bytes) == shown


def test_demo_is_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The name that ``generate`` takes."""
    from loraplex.demo import demo_adapters

    assert inspect("--json", *demo_adapters().values(), "--model", "demo") == 0
    reports = as_json(capsys)
    assert len(reports) == 7
    assert all(report["fits"] is True and not report["notes"] for report in reports)


@pytest.mark.parametrize("kind", ["alora", "target_parameters"])
def test_what_attach_does_not_carry_is_said(
    kind: str, tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config: dict[str, Any] = {"alora_invocation_tokens": [4, 2], "task_type": "CAUSAL_LM"}
    if kind == "target_parameters":
        config = {"target_parameters": ["down_proj"], "target_modules": []}
    path = tiny.train("mixtral", with_logits=False, **config).path
    assert inspect("--json", path) == 0
    (report,) = as_json(capsys)
    assert report["features"] == [kind]
    assert report["notes"][0].startswith(f"attach cannot serve it: not supported here: {kind} (")


def test_wrong_model_folder(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    trained = tiny.train(with_logits=False)
    assert inspect(trained.path, "--model", trained.path) == 2
    assert "must be a folder with a config.json" in capsys.readouterr().err
    (trained.path / "config.json").write_text('{"model_type": "no-such-model"}')
    assert inspect(trained.path, "--model", trained.path) == 2
    assert "no-such-model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"hidden_size": "large"},
        {"num_hidden_layers": None},
        {"vocab_size": -1},
        {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
         "model_type": "own"},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_a_model_that_cannot_be_built_is_one_line(
    changes: dict[str, Any], tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model("llama", tiny)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    (folder / "code.py").write_text("raise SystemExit('code of the model ran')")
    assert inspect(tiny.train(with_logits=False).path, "--model", folder) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"loraplex inspect: --model {folder}: ")
    assert printed.err.count("\n") == 1
    assert not printed.out
