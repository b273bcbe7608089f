"""What SGLang calls in each of its processes: registers the LoRA backend ``loraplex``."""

from __future__ import annotations

import logging
import typing
from typing import Any

from loraplex.engines.sglang.backend import make_backend
from loraplex.engines.sglang.support import NAME, check_support

logger = logging.getLogger(__name__)

OWN_DEFAULT = "csgmv"
PARENT = "triton_v2"


def register() -> None:
    """Offer ``loraplex`` as a LoRA backend, on the command line too.

    With a version of SGLang that the plugin does not know, the name stands for SGLang's default
    backend, and the log says so.
    """
    support = check_support()
    if support.problem:
        logger.warning(
            "loraplex: %s. The LoRA backend 'loraplex' is SGLang's own '%s' here.",
            support.problem,
            OWN_DEFAULT,
        )
    try:
        from sglang.srt.lora.backend.lora_registry import register_lora_backend

        offer_choice()
        register_lora_backend(NAME)(_make_own_default if support.problem else _make_ours)
        if not support.problem:
            count_as_parent()
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        # an SGLang from before backends were registered: the name is refused by its own parser
        logger.warning("loraplex: not registered with SGLang: %s: %s", type(error).__name__, error)


def offer_choice() -> None:
    """Let the parser of the command line accept the name."""
    from sglang.srt.server_args import ServerArgs

    annotation = typing.get_type_hints(ServerArgs, include_extras=True)["lora_backend"]
    for note in typing.get_args(annotation)[1:]:
        choices = getattr(note, "choices", None)
        if choices is not None and NAME not in choices:
            choices.append(NAME)


def count_as_parent() -> None:
    """Let SGLang's checks of combined arguments treat the backend as the one it extends.

    They refuse modes that it cannot serve and allow the MoE runners that need it.
    """
    from sglang.srt.arg_groups import lora_hook

    view = lora_hook.resolving_view
    if not getattr(view, "is_loraplex", False):

        def resolving_view(server_args: Any) -> Any:
            return BackendView(view(server_args))

        resolving_view.is_loraplex = True  # type: ignore[attr-defined]
        lora_hook.resolving_view = resolving_view


class BackendView:
    """SGLang's view of its arguments, in which ``loraplex`` reads as ``triton_v2``."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._view, name)
        return PARENT if name == "lora_backend" and value == NAME else value


def _make_ours() -> Any:
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
    from sglang.srt.lora.backend.triton_v2_backend import TritonV2LoRABackend
    from sglang.srt.lora.dense.plan import DenseLoraKind
    from sglang.srt.runtime_context import get_schedule

    def is_linear(kind: Any) -> bool:
        # batch-invariant mode replaces the GEMMs themselves; ours would undo it
        is_plain = kind is None or kind is DenseLoraKind.LINEAR
        return is_plain and not is_batch_invariant_mode_enabled()

    def most_tokens() -> int:
        schedule = get_schedule()
        # without chunks it is none or -1, and the budget of a prefill batch counts
        chunk = int(schedule.chunked_prefill_size or 0)
        return chunk if chunk > 0 else int(schedule.max_prefill_tokens)

    return make_backend(TritonV2LoRABackend, is_linear, most_tokens)


def _make_own_default() -> Any:
    from sglang.srt.lora.backend.lora_registry import get_backend_from_name

    return get_backend_from_name(OWN_DEFAULT)
