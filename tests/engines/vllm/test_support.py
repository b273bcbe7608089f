"""Whether the plugin is wanted, fits, and says so; vLLM itself is not installed here."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from loraplex.engines.vllm import plugin, plugin_status, support
from loraplex.engines.vllm.support import why_not_version

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Pretends that a vLLM is installed, with sources as expected unless a problem is given."""

    def install(version: str, problem: str = "", entry: str = "loraplex") -> None:
        points = [SimpleNamespace(name=entry)]
        monkeypatch.setattr(support, "_package", lambda: tmp_path)
        monkeypatch.setattr(support, "find_problems", lambda _: [problem] if problem else [])
        monkeypatch.setattr(metadata, "version", lambda _: version)
        monkeypatch.setattr(metadata, "entry_points", lambda group: points)

    for name in ("LORAPLEX", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    return install


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1", "0.27.1.post1", "0.33.0+cu130"])
def test_supported_versions(version: str) -> None:
    assert why_not_version(version) == ""


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.25.1", "vLLM 0.25.1 is outside the supported versions, 0.26 to 0.33"),
        ("0.34.0", "vLLM 0.34.0 is outside the supported versions, 0.26 to 0.33"),
        ("1.0.0", "vLLM 1.0.0 is outside the supported versions, 0.26 to 0.33"),
        ("0.30.0rc1", "vLLM 0.30.0rc1 is not a release"),
        ("0.30.1.dev3+g12", "vLLM 0.30.1.dev3+g12 is not a release"),
        ("dev", "vLLM dev is not a release"),
    ],
)
def test_other_versions(version: str, reason: str) -> None:
    assert why_not_version(version) == reason


def test_status_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_package", lambda: None)
    status = plugin_status()
    assert (status.name, status.installed_version, status.supported) == ("vllm", None, False)
    assert status.reason == "vLLM is not installed: pip install 'loraplex[vllm]'"


def test_status_off_and_on(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("0.26.0")
    assert not plugin_status().active
    assert plugin_status().reason == "off: LORAPLEX=1 turns it on"
    monkeypatch.setenv("LORAPLEX", "1")
    assert plugin_status().active
    assert plugin_status().reason == "vLLM 0.26.0 with --enable-lora runs on loraplex"
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert plugin_status().reason == "VLLM_PLUGINS leaves it out: other"
    assert not plugin_status().active


def test_status_of_what_does_not_fit(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX", "1")
    installed("0.40.0")
    assert not plugin_status().supported
    installed("0.26.0", problem="x.py: f is gone")
    assert "0.26.0 differs from what the plugin knows: x.py: f is gone" in plugin_status().reason
    assert not plugin_status().supported
    installed("0.26.0", entry="another")
    assert plugin_status().reason.startswith("no entry point loraplex in vllm.general_plugins")
    assert not plugin_status().active


class Vllm:
    """The modules of vLLM that the entry point imports, and what they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.manager = type("LoRAModelManager", (), {"__init__": lambda self, vllm_config: None})
        logger = SimpleNamespace(
            warning=lambda text, *values: self.said.append(text % values),
            info=lambda text, *values: self.said.append(text % values),
        )
        contents: dict[str, dict[str, Any]] = {
            "vllm": {"__path__": []},
            "vllm.logger": {"init_logger": lambda name: logger},
            "vllm.lora": {"__path__": []},
            "vllm.lora.model_manager": {"LoRAModelManager": self.manager},
        }
        for name, content in contents.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)


def test_off_unless_wanted(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("0.26.0")
    vllm = Vllm(monkeypatch)
    before = vllm.manager.__init__
    plugin.load()
    assert vllm.manager.__init__ is before
    assert vllm.said == []


def test_on_when_wanted(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("0.26.0")
    monkeypatch.setenv("LORAPLEX", "1")
    vllm = Vllm(monkeypatch)
    before = vllm.manager.__init__
    plugin.load()
    after = vllm.manager.__init__
    plugin.load()
    assert before is not after is vllm.manager.__init__


def test_unknown_version_says_so_and_changes_nothing(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("0.99.0")
    monkeypatch.setenv("LORAPLEX", "1")
    vllm = Vllm(monkeypatch)
    before = vllm.manager.__init__
    plugin.load()
    assert vllm.manager.__init__ is before
    assert vllm.said == [
        "loraplex is off: vLLM 0.99.0 is outside the supported versions, 0.26 to 0.33. "
        "LoRA runs on vLLM's own kernels."
    ]


def test_entry_point_and_extra_are_those_of_the_code() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]' in text
    assert 'loraplex = "loraplex.engines.vllm.plugin:load"' in text
    assert support.GROUP == "vllm.general_plugins"
    first, last = support.FIRST, support.LAST
    assert f'vllm = ["vllm>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"]' in text
