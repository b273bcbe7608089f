"""The fused kernels inside vLLM's LoRA layers: ``vllm serve --enable-lora`` with ``LORAPLEX=1``.

Installed beside vLLM, the plugin is found through the entry point group ``vllm.general_plugins`` in
every process of the engine; see docs/engines/vllm.md.
"""

from loraplex.engines.vllm.support import plugin_status

__all__ = ["plugin_status"]
