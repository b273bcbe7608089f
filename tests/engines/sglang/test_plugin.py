"""Registering with SGLang: which versions are served, and what happens with the others."""

from __future__ import annotations

import logging
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import pytest

from loraplex.cli import env
from loraplex.engines.sglang import plugin, plugin_status, support
from loraplex.engines.sglang.support import SUPPORTED, Support


class Arg:
    def __init__(self) -> None:
        self.choices = ["csgmv", "triton_v2"]


ARG = Arg()


class ServerArgs:
    lora_backend: Annotated[str, ARG] = "csgmv"


SCHEDULE = SimpleNamespace(chunked_prefill_size=-1, max_prefill_tokens=16384)


class TritonV2LoRABackend:
    name = "triton_v2"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of SGLang that ``register`` touches."""
    backends: dict[str, Any] = {"csgmv": lambda: "csgmv class"}

    def register_lora_backend(name: str) -> Any:
        return lambda make: backends.__setitem__(name, make)

    contents: dict[str, dict[str, Any]] = {
        "srt.lora.backend.lora_registry": {
            "register_lora_backend": register_lora_backend,
            "get_backend_from_name": lambda name: backends[name](),
        },
        "srt.lora.backend.triton_v2_backend": {"TritonV2LoRABackend": TritonV2LoRABackend},
        "srt.lora.dense.plan": {"DenseLoraKind": SimpleNamespace(LINEAR="linear")},
        "srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": lambda: False},
        "srt.runtime_context": {"get_schedule": lambda: SCHEDULE},
        "srt.server_args": {"ServerArgs": ServerArgs},
        "srt.arg_groups.lora_hook": {"resolving_view": lambda args: args},
    }
    names = {"", *contents}
    for name in contents:
        parts = name.split(".")
        names |= {".".join(parts[:end]) for end in range(1, len(parts))}
    for name in sorted(names):
        full = f"sglang.{name}".rstrip(".")
        module = ModuleType(full)
        module.__dict__.update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, full, module)
        parent, _, last = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    monkeypatch.setattr(ARG, "choices", ["csgmv", "triton_v2"])
    return SimpleNamespace(backends=backends, hook=sys.modules["sglang.srt.arg_groups.lora_hook"])


def installed(monkeypatch: pytest.MonkeyPatch, version: str, problem: str = "") -> None:
    monkeypatch.setattr(plugin, "check_support", lambda: Support(version, problem))


def test_known_version_gets_the_backend(
    fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, SUPPORTED[0])
    plugin.register()
    plugin.register()  # a process may load its plugins twice
    assert ARG.choices == ["csgmv", "triton_v2", "loraplex"]
    made = fake.backends["loraplex"]()
    assert issubclass(made, TritonV2LoRABackend)
    assert made.name == "triton_v2"
    assert [made.is_linear(kind) for kind in (None, "linear", "embedding")] == [True, True, False]
    assert made.most_tokens() == 16384
    monkeypatch.setattr(SCHEDULE, "chunked_prefill_size", 8192)
    assert made.most_tokens() == 8192
    # for SGLang's checks of its arguments, it is the backend that it extends
    args = SimpleNamespace(lora_backend="loraplex", tp_size=2)
    view = fake.hook.resolving_view(args)
    assert (view.lora_backend, view.tp_size) == ("triton_v2", 2)
    assert fake.hook.resolving_view(SimpleNamespace(lora_backend="csgmv")).lora_backend == "csgmv"


def test_unknown_version_gets_sglangs_own(
    fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, "0.9.9", "SGLang 0.9.9 is not one of the supported versions: 0.5.23")
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "0.9.9 is not one of the supported versions" in caplog.text
    assert "SGLang's own 'csgmv'" in caplog.text
    assert "loraplex" in ARG.choices
    assert fake.backends["loraplex"]() == "csgmv class"
    args = SimpleNamespace(lora_backend="loraplex")
    assert fake.hook.resolving_view(args) is args


def test_sglang_without_a_registry_is_left_alone(
    fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed(monkeypatch, "0.1.0", "too old")
    monkeypatch.setitem(sys.modules, "sglang.srt.lora.backend.lora_registry", None)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "not registered with SGLang" in caplog.text
    assert ARG.choices == ["csgmv", "triton_v2"]


def test_batch_invariant_mode_keeps_sglangs_path(
    fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, SUPPORTED[0])
    module = sys.modules["sglang.srt.batch_invariant_ops"]
    monkeypatch.setattr(module, "is_batch_invariant_mode_enabled", lambda: True)
    plugin.register()
    assert not fake.backends["loraplex"]().is_linear(None)


def test_env_says_whether_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "check_support", lambda: Support("0.5.22", "too old"))
    rows = {ability.name: ability for ability in env.abilities()}
    assert not rows["plugin for sglang"].is_available
    assert rows["plugin for sglang"].why == "too old"


@pytest.mark.parametrize(
    ("package", "version", "problems", "says"),
    [
        (None, "0.5.23", [], "SGLang is not installed: pip install 'loraplex[sglang]'"),
        ("there", None, [], "has no version"),
        ("there", "0.5.22", [], "SGLang 0.5.22 is not one of the supported versions: 0.5.23"),
        ("there", "0.5.23", ["a is gone", "b"], "differs from its release: a is gone and 1 more"),
        ("there", "0.5.23", [], ""),
        ("there", "0.5.23+local", [], ""),
    ],
)
def test_what_is_wrong_is_said(
    package: str | None, version: str | None, problems: list[str], says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def find_version(_name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(support, "_package", lambda: package and Path(package))
    monkeypatch.setattr(metadata, "version", find_version)
    monkeypatch.setattr(support, "find_problems", lambda _: problems)
    found = support.check_support()
    assert says in found.problem
    assert bool(found.problem) == bool(says)
    assert not plugin_status().active or not says


def test_status_follows_sglangs_list_of_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "check_support", lambda: Support("0.5.23", ""))
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    assert "install loraplex with pip" in plugin_status().reason
    points = [SimpleNamespace(name="loraplex")]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    assert plugin_status().active
    monkeypatch.setenv("SGLANG_PLUGINS", "another, third")
    status = plugin_status()
    assert (status.supported, status.active) == (True, False)
    assert "SGLANG_PLUGINS leaves it out: another,third" in status.reason
    monkeypatch.setenv("SGLANG_PLUGINS", "another,loraplex")
    assert plugin_status().active
