"""Whether the SGLang that is installed is one that the plugin knows."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from loraplex import env
from loraplex.engines.sglang.interface import find_problems
from loraplex.engines.status import PluginStatus

NAME = "loraplex"
GROUP = "sglang.srt.plugins"
SUPPORTED = ("0.5.23",)


@dataclass(frozen=True)
class Support:
    """The installed version, None without SGLang, and why the plugin cannot serve it, if so."""

    version: str | None
    problem: str


def check_support() -> Support:
    """Compare the installed SGLang, version and sources, with what the plugin was made for."""
    package = _package()
    if package is None:
        return Support(None, "SGLang is not installed: pip install 'loraplex[sglang]'")
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return Support(None, f"the sglang in {package} has no version (no dist-info folder)")
    if version.partition("+")[0] not in SUPPORTED:
        known = ", ".join(SUPPORTED)
        return Support(version, f"SGLang {version} is not one of the supported versions: {known}")
    problems = find_problems(package)
    if problems:
        rest = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        return Support(version, f"SGLang {version} differs from its release: {problems[0]}{rest}")
    return Support(version, "")


def plugin_status() -> PluginStatus:
    """What ``loraplex env`` says about SGLang; nothing of SGLang is imported."""
    support = check_support()
    if support.version is None or support.problem:
        return PluginStatus("sglang", support.version, False, support.problem, False)
    if NAME not in {point.name for point in metadata.entry_points(group=GROUP)}:
        why = f"no entry point {NAME} in {GROUP}: install loraplex with pip, not from a path"
        return PluginStatus("sglang", support.version, True, why, False)
    allowed = env.plugin_names("SGLANG_PLUGINS")
    if allowed and NAME not in allowed:
        why = f"SGLANG_PLUGINS leaves it out: {','.join(allowed)}"
        return PluginStatus("sglang", support.version, True, why, False)
    why = f"SGLang {support.version} offers --lora-backend {NAME}"
    return PluginStatus("sglang", support.version, True, why, True)


def _package() -> Path | None:
    spec = importlib.util.find_spec("sglang")
    folders = spec.submodule_search_locations if spec else None
    return Path(next(iter(folders))) if folders else None
