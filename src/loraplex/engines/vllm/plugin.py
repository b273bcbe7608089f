"""The entry point that vLLM calls in each of its processes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from loraplex import env
from loraplex.engines.vllm.support import check_support
from loraplex.version import __version__


def load() -> None:
    """Let vLLM's LoRA run on our kernels, if ``LORAPLEX=1``; may be called any number of times.

    Anything that does not fit is said in vLLM's log, and vLLM's own path is kept.
    """
    if not env.is_plugin_wanted():
        return
    from vllm.logger import init_logger

    logger = init_logger("vllm.plugins.loraplex")
    problem = check_support().problem
    if problem:
        logger.warning("loraplex is off: %s. LoRA runs on vLLM's own kernels.", problem)
        return
    from vllm.lora.model_manager import LoRAModelManager

    install(LoRAModelManager, logger)


def install(manager_class: type[Any], logger: Any) -> None:
    """Have every manager that is made from here on hand over its layers; once per class."""
    original = manager_class.__init__
    if hasattr(original, "_loraplex"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        given = signature.bind(self, *args, **options).arguments
        hand_over(self, given["vllm_config"], logger)

    init._loraplex = True  # type: ignore[attr-defined]
    manager_class.__init__ = init


def hand_over(
    manager: Any,
    vllm_config: Any,
    logger: Any,
    adopt: Callable[[Any, Any], Mapping[str, int] | str] | None = None,
) -> None:
    """Adopt a new manager's layers, or say why not."""
    try:
        outcome = (adopt or adopt_all)(manager, vllm_config)
    except Exception:
        logger.exception("loraplex is off after an error. LoRA runs on vLLM's own kernels.")
        return
    if isinstance(outcome, str):
        logger.warning("loraplex is off: %s. LoRA runs on vLLM's own kernels.", outcome)
        return
    logger.info(
        "loraplex %s is on: %d layers fused with their GEMM, %d added to their base output, "
        "%d on vLLM's own path.",
        __version__, outcome["fused"], outcome["added"], outcome["own"],
    )  # fmt: skip


def adopt_all(manager: Any, vllm_config: Any) -> Mapping[str, int] | str:
    """Adopt every layer that fits: how many of each kind, or why none."""
    import vllm.envs
    from loraplex.engines.vllm.adopt import adopt, make_plan, why_not
    from loraplex.engines.vllm.layers import added, fused, watched

    reason = why_not(manager, vllm_config, is_batch_invariant=bool(vllm.envs.VLLM_BATCH_INVARIANT))
    if reason:
        return reason
    plan = make_plan(manager)
    fuse, add = plan.count(fused), plan.count(added)
    if not fuse + add:
        return f"none of the {len(manager.modules)} LoRA layers is one that it knows"
    adopt(manager, vllm_config, plan, is_rehearsed=True)
    return {"fused": fuse, "added": add, "own": len(plan.own) + plan.count(watched)}
