"""The fused kernel inside SGLang's model path, as its LoRA backend ``loraplex``.

SGLang finds the plugin through the entry point group ``sglang.srt.plugins``. It is
switched on with ``--lora-backend loraplex``; docs/engines/sglang.md tells more.
"""

from loraplex.engines.sglang.support import plugin_status

__all__ = ["plugin_status"]
