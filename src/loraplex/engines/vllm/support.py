"""Whether the vLLM that is installed is one that the plugin knows."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from loraplex import env
from loraplex.engines.status import PluginStatus
from loraplex.engines.vllm.interface import find_problems

NAME = "loraplex"
GROUP = "vllm.general_plugins"
# releases that the plugin was read against: from the first to the last
FIRST, LAST = (0, 26), (0, 33)
RANGE = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"


@dataclass(frozen=True)
class Support:
    """The installed version, None without vLLM, and why the plugin cannot serve it, if so."""

    version: str | None
    problem: str


def check_support() -> Support:
    """Compare the installed vLLM, version and sources, with what the plugin was made for."""
    package = _package()
    if package is None:
        return Support(None, "vLLM is not installed: pip install 'loraplex[vllm]'")
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return Support(None, f"the vllm in {package} has no version (no dist-info folder)")
    return Support(version, why_not_version(version) or why_not_sources(version, package))


def why_not_version(version: str) -> str:
    """Why a version is not served; empty if it is.

    Example:
        >>> why_not_version("0.26.0"), why_not_version("0.33.0+cu130")
        ('', '')
        >>> why_not_version("0.34.0")
        'vLLM 0.34.0 is outside the supported versions, 0.26 to 0.33'
    """
    found = re.match(r"(\d+)\.(\d+)(?:\.\d+)*(?:\.post\d+)?(?:\+.*)?$", version)
    if found is None:
        return f"vLLM {version} is not a release"
    if not FIRST <= (int(found[1]), int(found[2])) <= LAST:
        return f"vLLM {version} is outside the supported versions, {RANGE}"
    return ""


def why_not_sources(version: str, package: Path) -> str:
    """Why the sources in a folder are not served; empty if they are."""
    problems = find_problems(package)
    if not problems:
        return ""
    rest = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"vLLM {version} differs from what the plugin knows: {problems[0]}{rest}"


def plugin_status() -> PluginStatus:
    """What ``loraplex env`` says about vLLM; nothing of vLLM is imported."""
    support = check_support()
    if support.version is None or support.problem:
        return PluginStatus("vllm", support.version, False, support.problem, False)
    why = _why_not_active()
    if why:
        return PluginStatus("vllm", support.version, True, why, False)
    why = f"vLLM {support.version} with --enable-lora runs on loraplex"
    return PluginStatus("vllm", support.version, True, why, True)


def _why_not_active() -> str:
    if NAME not in {point.name for point in metadata.entry_points(group=GROUP)}:
        return f"no entry point {NAME} in {GROUP}: install loraplex with pip, not from a path"
    allowed = env.plugin_names("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed:
        return f"VLLM_PLUGINS leaves it out: {','.join(allowed)}"
    if not env.is_plugin_wanted():
        return "off: LORAPLEX=1 turns it on"
    return ""


def _package() -> Path | None:
    spec = importlib.util.find_spec("vllm")
    folders = spec.submodule_search_locations if spec else None
    return Path(next(iter(folders))) if folders else None
