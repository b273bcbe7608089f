"""Damaged, foreign and hostile folders: one clear error each, and nothing loaded."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

from loraplex.adapters import load_adapter
from loraplex.adapters.folder import AdapterFolder
from loraplex.errors import AdapterError, UnsupportedAdapterError

WEIGHTS = "adapter_model.safetensors"
LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
NAME = "base_model.model.model.layers.0.self_attn.q_proj"


def write_adapter(path: Path, r: int = 4, **tensors: torch.Tensor) -> Path:
    """A PEFT folder without peft."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": r, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    pair = {
        f"{NAME}.lora_A.weight": torch.randn(r, 32),
        f"{NAME}.lora_B.weight": torch.randn(32, r),
    }
    save_file({**pair, **tensors}, path / WEIGHTS)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "good")


def refusal(path: Any, **options: Any) -> str:
    """The message of the error that loading has to raise, on one line and not too long."""
    with pytest.raises(AdapterError) as caught:
        load_adapter(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


def test_good_folder_loads(folder: Path) -> None:
    adapter = load_adapter(folder)
    assert list(adapter.modules) == ["model.layers.0.self_attn.q_proj"]
    assert adapter.path == str(folder)
    assert adapter.num_bytes == 2 * 4 * 32 * 4


# --- damaged weights: L37 ---------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 5, 8, 40, 0.5, -1], ids=str)
def test_l37_truncated_safetensors(keep: float, folder: Path) -> None:
    file = folder / WEIGHTS
    data = file.read_bytes()
    count = int(len(data) * keep) if isinstance(keep, float) else keep
    file.write_bytes(data[:count])
    assert "truncated" in refusal(folder)


def test_l37_lfs_pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text(LFS_POINTER)
    assert "looks like an LFS pointer" in refusal(folder)


def test_l37_lfs_pointer_instead_of_bin_and_of_config(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_text(LFS_POINTER)
    assert "adapter_model.bin looks like an LFS pointer" in refusal(folder)
    (folder / "adapter_config.json").write_text(LFS_POINTER)
    assert "adapter_config.json looks like an LFS pointer" in refusal(folder)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
def test_l37_pickle_named_safetensors(is_zip: bool, folder: Path) -> None:
    tensors = load((folder / WEIGHTS).read_bytes())  # not mapped
    torch.save(tensors, folder / WEIGHTS, _use_new_zipfile_serialization=is_zip)
    assert "holds a torch.save file (a pickle), not safetensors" in refusal(folder)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(b"<html>404 not found</html>", "no safetensors file", id="html"),
        pytest.param(b"\x40" + bytes(7) + b"{" + b"x" * 80, "is corrupt", id="no-json"),
        pytest.param(b"\x02" + bytes(7) + b"{}" + b"x" * 8, "corrupt", id="trailing-bytes"),
        pytest.param(b"\x02" + bytes(7) + b"{}", "holds no adapter tensors", id="empty"),
        pytest.param(b"\xff" * 200, "no safetensors file", id="ff"),
    ],
)
def test_l37_no_safetensors(data: bytes, said: str, folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(data)
    assert said in refusal(folder)


def test_l37_every_cut_and_every_flipped_byte_is_an_adapter_error_or_loads(folder: Path) -> None:
    """No input gets another exception out of the loader."""
    file = folder / WEIGHTS
    data = bytearray(file.read_bytes())
    for position in range(260):
        for flip in (0x01, 0x80, 0xFF):
            damaged = data.copy()
            damaged[position] ^= flip
            file.write_bytes(damaged)
            with contextlib.suppress(AdapterError):
                load_adapter(folder)


def header_of(*entries: tuple[str, Any], tail: bytes = bytes(64)) -> bytes:
    """A file with these header entries; a name may occur twice."""
    text = "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(e)}" for name, e in entries) + "}"
    return len(text).to_bytes(8, "little") + text.encode() + tail


def entry(begin: Any, end: Any, *shape: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (header_of(("a", entry(0, 64, 16))), "neither LoRA"),
        (header_of(("__metadata__", {"x": "y"}), ("a", entry(0, 64, 16))), "neither LoRA"),
        (header_of(("a", entry(0, 32, 8)), ("b", entry(16, 64, 12))), "is corrupt"),
        (header_of(("a", entry(0, 16, 4)), ("b", entry(32, 64, 8))), "is corrupt"),
        (header_of(("a", entry(0, 64, 15))), "is corrupt"),
        (header_of(("a", entry(0, 32, 8))), "is corrupt"),
        (header_of(("a", entry(0, 128, 32))), "truncated: "),
        (header_of(("a", entry(0, 32, 8)), ("a", entry(32, 64, 8))), "is corrupt"),
        (header_of(("a", entry(0, 64, -4, -4))), "is corrupt"),
        (header_of(("a", entry(0, 64, True, 16))), "is corrupt"),
        (header_of(("a", entry(0, 0, 0, 1 << 62))), "is corrupt"),
        (header_of(("a", entry(0, 0, 0, 10**40, 10**40))), "is corrupt"),
        (header_of(("a", entry(0, 64, 16, dtype=4))), "is corrupt"),
        (header_of(("a", entry(0, 64, 16, dtype=["F32"]))), "is corrupt"),
        (header_of(("a", [1, 2])), "is corrupt"),
        (header_of(("a", {"dtype": "F32", "shape": 4, "data_offsets": [0, 64]})), "is corrupt"),
        (header_of(("a", {"dtype": "F32", "shape": [16]})), "is corrupt"),
        ((10**9).to_bytes(8, "little") + b"{}", "end inside its header"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_l37_headers(data: bytes, said: str, folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(data)
    assert said in refusal(folder)


def test_dtype_that_torch_lacks(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"E8M"'))
    with pytest.raises(UnsupportedAdapterError, match="no torch dtype.*E8M"):
        load_adapter(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool], ids=str)
def test_dtype_that_is_no_float_is_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    path = write_adapter(
        tmp_path / "x", **{f"{NAME}.lora_A.weight": torch.ones(4, 32).to(dtype)}
    )  # fmt: skip
    assert f"dtype {dtype}" in refusal(path)


# --- pickles: L38 -----------------------------------------------------------------------------


class Touch:
    """Unpickling it runs code."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return (open, (self.marker, "w"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("is_zip", [True, False], ids=["torch-save", "plain-pickle"])
def test_l38_pickle_runs_no_code(is_zip: bool, folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).unlink()
    marker = tmp_path / "marker"
    evil = {f"{NAME}.lora_A.weight": Touch(str(marker))}
    if is_zip:
        torch.save(evil, folder / "adapter_model.bin")
    else:
        (folder / "adapter_model.bin").write_bytes(pickle.dumps(evil))
    assert "weights-only loading" in refusal(folder)
    assert not marker.exists()
    with (folder / "adapter_model.bin").open("rb") as file:
        torch.load(file, weights_only=False) if is_zip else pickle.load(file)
    assert marker.exists(), "the file of this test has to be able to run code"


def test_l38_safetensors_is_preferred(folder: Path) -> None:
    torch.save({"other": torch.ones(1)}, folder / "adapter_model.bin")
    assert list(load_adapter(folder).modules) == ["model.layers.0.self_attn.q_proj"]


def test_bin_loads_with_weights_only(folder: Path) -> None:
    tensors = load((folder / WEIGHTS).read_bytes())  # not mapped
    expected = load_adapter(folder).modules["model.layers.0.self_attn.q_proj"]
    (folder / WEIGHTS).unlink()
    tensors[f"{NAME}.lora_B.weight"] = tensors[f"{NAME}.lora_B.weight"].T.contiguous().T
    torch.save(tensors, folder / "adapter_model.bin")
    found = load_adapter(folder).modules["model.layers.0.self_attn.q_proj"]
    assert torch.equal(found.a, expected.a)
    assert torch.equal(found.b, expected.b)
    assert found.b.is_contiguous()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param([torch.ones(2)], "must hold a dict of tensors", id="list"),
        pytest.param({"x": 3}, "must map names to tensors", id="number"),
        pytest.param({7: torch.ones(2)}, "must map names to tensors", id="key"),
        pytest.param({"x": torch.ones(1).expand(10**9, 10**3)}, "claims shape", id="bomb"),
        pytest.param({"x": torch.ones(2, 2).to_sparse()}, "not a dense tensor", id="sparse"),
    ],
)
def test_bin_of_other_things(content: Any, said: str, folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save(content, folder / "adapter_model.bin")
    assert said in refusal(folder)


def test_bin_that_unpacks_to_more_than_it_shows(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    plain, packed = folder / "plain.bin", folder / "adapter_model.bin"
    torch.save({f"{NAME}.lora_A.weight": torch.zeros(4, 1 << 20)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w") as target:
        for name in source.namelist():
            target.writestr(name, source.read(name), compress_type=zipfile.ZIP_DEFLATED)
    assert packed.stat().st_size < plain.stat().st_size // 100
    torch.load(packed, weights_only=True)  # torch unpacks it
    assert "a compressed archive, which torch.save never writes" in refusal(folder)


@pytest.mark.parametrize("name", [WEIGHTS, "adapter_model.bin"])
def test_a_file_larger_than_the_memory_is_not_read(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(b"never read" * 100)
    monkeypatch.setattr("loraplex.adapters.folder.physical_memory", lambda: 999)
    assert f"{name} has 1000 bytes, more than this machine's 999 of memory" in refusal(folder)
    monkeypatch.undo()
    os.truncate(folder / name, 1 << 42)  # takes no room on disk
    assert f"{name} has {1 << 42} bytes, more than" in refusal(folder)


def test_a_link_put_in_place_of_a_checked_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, outside = tmp_path / "root", write_adapter(tmp_path / "outside")
    victim = write_adapter(root / "a")
    contained = AdapterFolder._contained

    def swap(self: AdapterFolder, name: str) -> str:
        path = contained(self, name)
        if name == WEIGHTS:
            (victim / WEIGHTS).unlink()
            (victim / WEIGHTS).symlink_to(outside / WEIGHTS)
        return path

    monkeypatch.setattr(AdapterFolder, "_contained", swap)
    assert f"cannot open {WEIGHTS}" in refusal("a", root=root)


def test_truncated_bin(folder: Path) -> None:
    tensors = load((folder / WEIGHTS).read_bytes())  # not mapped
    (folder / WEIGHTS).unlink()
    file = folder / "adapter_model.bin"
    torch.save(tensors, file)
    file.write_bytes(file.read_bytes()[:-200])
    assert "cannot be read by weights-only loading" in refusal(folder)


# --- config: L39, L40, L10 --------------------------------------------------------------------


def set_config(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"r": 0}, "r must be a positive integer, got 0", id="L10-r-0"),
        pytest.param({"r": -5}, "r must be a positive integer, got -5", id="L10-r-negative"),
        pytest.param({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj'] must be", id="L10"),
        pytest.param({"r": True}, "r must be", id="r-bool"),
        pytest.param({"r": "8"}, "r must be", id="r-text"),
        pytest.param({"r": 8.5}, "r must be", id="r-fraction"),
        pytest.param({"lora_alpha": float("nan")}, "lora_alpha must be a finite", id="alpha-nan"),
        pytest.param({"lora_alpha": "16"}, "lora_alpha must be", id="alpha-text"),
        pytest.param({"lora_alpha": 1e39}, "lora_alpha must be a finite", id="alpha-no-float32"),
        pytest.param({"lora_alpha": 10**400}, "lora_alpha must be", id="alpha-huge"),
        pytest.param({"alpha_pattern": {"q": None}}, "alpha_pattern['q']", id="alpha-pattern"),
        pytest.param({"alpha_pattern": [1]}, "alpha_pattern must be a dict", id="pattern-list"),
        pytest.param({"rank_pattern": {"(": 4}}, "no regular expression", id="pattern-regex"),
        pytest.param({"rank_pattern": {"a{99999999999}": 4}}, "no regular expression: the repet",
                     id="pattern-too-large"),
        pytest.param({"alpha_pattern": {"(" * 9999 + ")" * 9999: 4}}, "no regular expression",
                     id="pattern-too-deep"),
        pytest.param({"rank_pattern": {"(?<=a)b": 4}}, "the pattern '(?<=a)b' is not supported",
                     id="pattern-look-behind"),
        pytest.param({"use_rslora": "yes"}, "use_rslora must be true or false", id="rslora"),
        pytest.param({"bias": "some"}, "bias must be one of", id="bias"),
        pytest.param({"target_modules": [1]}, "target_modules must be", id="targets"),
        pytest.param({"modules_to_save": {"a": 1}}, "modules_to_save must be", id="saved"),
        pytest.param({"trainable_token_indices": [3, -1]}, "token_indices must be token ids from 0",
                     id="negative-token"),
        pytest.param({"trainable_token_indices": {"wte": [-1]}}, "token_indices must be",
                     id="negative-token-by-name"),
        pytest.param({"base_model_name_or_path": 3}, "base_model_name_or_path must be", id="base"),
    ],
)  # fmt: skip
def test_bad_config_is_refused_before_tensors_are_read(
    changes: dict[str, Any], said: str, folder: Path
) -> None:
    set_config(folder, **changes)
    (folder / WEIGHTS).write_bytes(b"never read")
    assert said in refusal(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("{}", "no peft_type", id="L40-empty"),
        pytest.param("[1]", "must hold a JSON object", id="list"),
        pytest.param('{"peft_type": "LORA"', "no valid JSON", id="cut"),
        pytest.param("[" * 100_000, "no valid JSON", id="deep"),
        pytest.param(b"\xff\xfe{\x00", "no valid JSON", id="utf-16"),
        pytest.param('{"peft_type": 7}', "peft_type must be 'LORA'", id="number"),
        pytest.param('{"fine_tune_type": "lora", "lora_parameters": {}}', "MLX", id="mlx"),
    ],
)
def test_config_that_is_no_peft_config(text: str | bytes, said: str, folder: Path) -> None:
    data = text.encode() if isinstance(text, str) else text
    (folder / "adapter_config.json").write_bytes(data)
    assert said in refusal(folder)


def test_l40_other_methods_half_written_folders_and_the_next_candidate(
    folder: Path, tmp_path: Path
) -> None:
    set_config(folder, peft_type="IA3")
    with pytest.raises(UnsupportedAdapterError, match="'IA3'"):
        load_adapter(folder)
    half_written = write_adapter(tmp_path / "half")
    (half_written / WEIGHTS).unlink()
    empty = tmp_path / "empty"
    empty.mkdir()
    good = write_adapter(tmp_path / "next")
    loaded = []
    for candidate in (folder, half_written, empty, tmp_path / "missing", good):
        with contextlib.suppress(AdapterError):
            loaded.append(load_adapter(candidate))
    assert [adapter.path for adapter in loaded] == [str(good)]


def test_l40_base_model_may_be_missing(folder: Path) -> None:
    assert load_adapter(folder).spec.base_model is None


@pytest.mark.parametrize(
    "key", ["eva_config", "corda_config", "enable_lora", "use_dora", "layer_replication", "foobar"]
)
def test_l39_null_false_and_empty_are_ignored(
    key: str, folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
    values: list[Any] = [None] if key == "use_dora" else [None, False, {}, []]
    for value in [*values, False]:
        set_config(folder, **{key: value})
        load_adapter(folder)
    assert not recwarn.list


def test_unknown_keys_are_escaped_in_the_warning(folder: Path) -> None:
    set_config(folder, **{"a\x1b[2J": "\x1b]0;title\x07"})
    with pytest.warns(UserWarning, match=r"a\\x1b\[2J=") as caught:
        load_adapter(folder)
    assert str(caught[0].message).isprintable()


@pytest.mark.parametrize("pattern", ["(.*)*x", "((a|a)+)+b", "(((.*)?_)*)*x", "a?" * 60 + "a" * 60])
def test_a_pattern_cannot_keep_a_process_busy(pattern: str, folder: Path) -> None:
    module = "a" * 60 + ".q_proj"
    pair = {
        f"{module}.lora_A.weight": torch.ones(4, 32),
        f"{module}.lora_B.weight": torch.ones(8, 4),
    }
    save_file(pair, folder / WEIGHTS)
    set_config(folder, r=4, rank_pattern={pattern: 2})
    start = time.perf_counter()
    assert load_adapter(folder).modules[module].rank == 4
    assert time.perf_counter() - start < 5  # re alone would take years


def test_l39_unknown_key_is_warned_about_once(folder: Path) -> None:
    set_config(folder, foobar={"x": 1}, other=2)
    with pytest.warns(UserWarning, match=r"foobar=\{'x': 1\}, other=2") as caught:
        load_adapter(folder)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "key",
    ["arrow_config", "enable_lora", "kasa_config", "layer_replication", "megatron_config",
     "monteclora_config", "use_bdlora", "use_qalora"],
)  # fmt: skip
def test_l39_known_but_unsupported_key_is_refused_by_name(key: str, folder: Path) -> None:
    set_config(folder, **{key: [True]})
    with pytest.raises(UnsupportedAdapterError, match=f"{key}=.* is not supported"):
        load_adapter(folder)


def test_huge_config_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_bytes(b" " * ((16 << 20) + 1))
    assert "more than" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["a\nb", "\x1b[2Ja", "x." * 3000 + "y"], ids=["line", "esc", "long"]
)
def test_names_that_would_break_a_message_are_shown_escaped_and_cut(
    name: str, tmp_path: Path
) -> None:
    pair = {f"{name}.lora_A.weight": torch.ones(4, 8), f"{name}.lora_B.weight": torch.ones(8, 4)}
    path = write_adapter(tmp_path / "x", **pair)
    message = refusal(path)
    assert "2 of 4 tensors have names that are neither LoRA" in message
    assert message.isprintable()
    assert load_adapter(path, strict=False).ignored == tuple(sorted(pair))


@pytest.mark.parametrize(
    "name", ["new_embeddings.safetensors", "new_embeddings.bin", "trainable_params.bin"]
)
def test_trained_weights_in_other_files_are_not_left_out_in_silence(
    name: str, folder: Path
) -> None:
    (folder / name).write_bytes(b"never read")
    with pytest.raises(UnsupportedAdapterError, match=rf"{name} has weights that were trained"):
        load_adapter(folder)
    assert load_adapter(folder, strict=False).ignored == (name,)


# --- private memory: S24, L45 -----------------------------------------------------------------


def test_s24_later_changes_of_the_file_do_not_reach_the_adapter(folder: Path) -> None:
    adapter = load_adapter(folder)
    before = {name: tensor.clone() for name, tensor in adapter.tensors()}
    file = folder / WEIGHTS
    with file.open("r+b") as handle:
        handle.write(b"\xff" * file.stat().st_size)
    os.truncate(file, 0)
    after = dict(adapter.tensors())
    assert all(torch.equal(after[name], before[name]) for name in before)
    file.unlink()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_l45_bits_are_those_of_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    a = torch.randn(4, 32).to(dtype)
    a[0, :3] = torch.tensor([-0.0, torch.finfo(dtype).tiny / 4, torch.finfo(dtype).max])
    path = write_adapter(
        tmp_path / "x",
        **{f"{NAME}.lora_A.weight": a, f"{NAME}.lora_B.weight": torch.ones(32, 4, dtype=dtype)},
    )
    (module,) = load_adapter(path).modules.values()
    assert module.a.dtype == dtype
    assert torch.equal(module.a.view(torch.uint8), a.view(torch.uint8))


# --- paths: S12, S13, S31 ---------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    write_adapter(root / "ok")
    write_adapter(root / "team" / "nested")
    write_adapter(tmp_path / "outside")
    write_adapter(tmp_path / "root-sibling")
    (root / "link_to_outside").symlink_to(tmp_path / "outside")
    (root / "link_to_ok").symlink_to(root / "ok")
    (root / "loop").symlink_to(root / "loop")
    stolen = write_adapter(root / "stolen")
    (stolen / WEIGHTS).unlink()
    (stolen / WEIGHTS).symlink_to(tmp_path / "outside" / WEIGHTS)
    return root


@pytest.mark.parametrize("name", ["ok", "team/nested", "link_to_ok", "./ok", "ok/", "team/../ok"])
def test_s12_names_inside_the_root_load(name: str, root: Path) -> None:
    assert load_adapter(name, root=root).max_rank == 4
    assert load_adapter(root / "ok", root=root).max_rank == 4


@pytest.mark.parametrize(
    "name",
    ["/etc", "../outside", "link_to_outside", "ok/../../outside", "%2e%2e/outside", "ok\0",
     "x" * 5000, "loop", "", ".", "..", "../root-sibling", "stolen", "missing", "~",
     "ok/" + WEIGHTS, "\ud800", "ok/\ud800"],
    ids=lambda name: repr(name)[:30],
)  # fmt: skip
def test_s12_names_that_leave_the_root_are_refused_without_paths(name: str, root: Path) -> None:
    message = refusal(name, root=root)
    assert str(root.parent) not in message
    assert "outside" not in message.replace(repr(name), "").replace("outside the allowed", "")


def test_an_empty_root_is_not_the_current_folder(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(ValueError, match="root must be a folder, got ''"):
        load_adapter("ok", root="")


def test_s31_errors_under_a_root_show_only_the_asked_name(root: Path) -> None:
    set_config(root / "ok", r=8)
    message = refusal("ok", root=root)
    assert message.startswith("adapter 'ok': ")
    assert str(root) not in message
    assert "nested" not in refusal("team", root=root), "names of others"


def test_s13_hub_names_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no such folder (loraplex downloads nothing)" in refusal("someorg/repo")


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
def test_pipes_and_folders_in_place_of_files_do_not_hang(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert f"{name} is not a regular file" in refusal(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    assert f"{name} is not a regular file" in refusal(folder)
    (folder / name).rmdir()
    (folder / name).symlink_to(folder / "nowhere")
    assert f"cannot open {name}" in refusal(folder)


def test_messages_help_with_the_wrong_folder(folder: Path) -> None:
    assert "there is one in the sub-folder good" in refusal(folder.parent)
    assert "a file, not a folder" in refusal(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "adapters.safetensors")
    assert "the folder holds adapter_config.json, adapters.safetensors" in refusal(folder)


@pytest.mark.parametrize("path", [b"bytes", 3, None])
def test_path_of_a_wrong_type(path: Any) -> None:
    with pytest.raises(TypeError):
        load_adapter(path)
