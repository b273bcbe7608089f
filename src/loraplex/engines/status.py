"""Whether a serving engine's plugin is there, fits the engine's version, and is switched on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PluginStatus:
    """What ``loraplex env`` says about one engine; each engine has a ``plugin_status()``.

    Attributes:
        name: the engine, as its package is called: ``sglang``, ``vllm``.
        installed_version: version of the engine that is installed, None without it.
        supported: whether the plugin knows this version and its interface is as expected.
        reason: one sentence: what is on, or what is missing and how to get it.
        active: whether the engine, started here and now, loads the plugin and accepts it.
    """

    name: str
    installed_version: str | None
    supported: bool
    reason: str
    active: bool
