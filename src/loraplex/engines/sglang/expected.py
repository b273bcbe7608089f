"""The names, parameters and lines of SGLang that the plugin relies on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """A name that must be there, with these parameters, and with these lines in its code.

    Lines are in the spelling of :func:`ast.unparse`.
    """

    file: str
    name: str
    parameters: tuple[str, ...] | None = None
    code: tuple[str, ...] = ()


_REGISTRY = "srt/lora/backend/lora_registry.py"
_BACKEND = "srt/lora/backend/triton_v2_backend.py"
_RUNNER = "srt/lora/dense/runner.py"
_LAYERS = "srt/lora/layers.py"
_MANAGER = "srt/lora/lora_manager.py"
_POOL = "srt/lora/mem_pool.py"
_UNQUANTISED = "srt/layers/quantization/unquant.py"
_FIELDS = "srt/arg_groups/fields/lora.py"
_HOOK = "srt/arg_groups/lora_hook.py"
_CONTEXT = "srt/runtime_context.py"
_SCHEDULE = "srt/arg_groups/fields/schedule.py"

_COLUMN_BIAS = "bias = self.base_layer.bias if not self.base_layer.skip_bias_add else None"
_ACTIVE = "if self.lora_active:"

EXPECTED = (
    # how a backend is registered, and found by its name
    Expected("srt/plugins/__init__.py", "load_plugins", ()),
    Expected("srt/plugins/__init__.py", "GENERAL_PLUGINS_GROUP", code=("'sglang.srt.plugins'",)),
    Expected(_REGISTRY, "register_lora_backend", ("name",)),
    Expected(_REGISTRY, "get_backend_from_name", ("name",), ("LORA_SUPPORTED_BACKENDS[name]()",)),
    Expected(_FIELDS, "Lora.lora_backend", code=("choices=[", "'triton_v2'")),
    Expected(_HOOK, "resolving_view"),
    Expected(_HOOK, "check_lora_server_args", ("server_args",), ("resolving_view(server_args)",)),
    Expected(
        _HOOK, "check_lora_moe_runner_args", ("server_args",), ("resolving_view(server_args)",)
    ),
    # the backend that ours extends
    Expected(
        _BACKEND, "TritonV2LoRABackend.__init__",
        ("self", "max_loras_per_batch", "device", "**kwargs"),
    ),
    Expected(_BACKEND, "TritonV2LoRABackend.runner"),
    Expected(_BACKEND, "TritonV2LoRABackend.name", code=("'triton_v2'",)),
    Expected(_BACKEND, "TritonV2LoRABackend.skip_inactive_dense_lora", code=("True",)),
    Expected(_BACKEND, "TritonV2LoRABackend.supports_prefill_cuda_graph", code=("True",)),
    Expected(_BACKEND, "TritonV2LoRABackend.reset_batch_state", ("self",)),
    Expected(_BACKEND, "TritonV2LoRABackend.reset_routing_cache", ("self",)),
    Expected(
        _BACKEND, "TritonV2LoRABackend.prepare_lora_batch",
        ("self", "forward_batch", "weight_indices", "lora_ranks", "scalings",
         "use_decode_cuda_graph", "use_prefill_cuda_graph"),
        ("token_slots=batch.token_slots",),
    ),
    Expected(
        _BACKEND, "TritonV2LoRABackend.forward_with_base",
        ("self", "layer", "x", "base_fn", "lora_a", "lora_b", "output_offset", "offsets", "*",
         "all_reduce", "kind", "pruned_batch_info"),
    ),
    Expected("srt/lora/backend/base_backend.py", "_compute_token_lora_mapping"),
    Expected(_RUNNER, "DenseLoraRunner.token_slots"),
    Expected(_RUNNER, "DenseLoraRunner.set_num_tokens", ("self", "num_tokens")),
    Expected("srt/lora/dense/plan.py", "DenseLoraKind.LINEAR"),
    Expected("srt/batch_invariant_ops/batch_invariant_ops.py", "is_batch_invariant_mode_enabled",
             ()),
    # how many tokens a step may have
    Expected(_CONTEXT, "get_schedule", ()),
    Expected(_SCHEDULE, "Schedule.chunked_prefill_size"),
    Expected(_SCHEDULE, "Schedule.max_prefill_tokens"),
    # the layers that call it: what base_fn computes, and who reduces
    Expected(
        _LAYERS, "ColumnParallelLinearWithLoRA.forward", ("self", "input_"),
        (_COLUMN_BIAS, "self.base_layer.quant_method.apply(self.base_layer, input_, bias)"),
    ),
    Expected(_LAYERS, "MergedColumnParallelLinearWithLoRA.set_lora_info"),
    Expected(_LAYERS, "QKVParallelLinearWithLoRA.set_lora_info"),
    Expected(
        _LAYERS, "RowParallelLinearWithLoRA.forward",
        ("self", "input_", "skip_all_reduce", "forward_batch"),
        ("self.base_layer.quant_method.apply(self.base_layer, input_parallel, bias=bias_)",
         "all_reduce=all_reduce if should_reduce else None"),
    ),
    Expected(
        _LAYERS, "ReplicatedLinearWithLoRA.forward", ("self", "x"),
        (_COLUMN_BIAS, "self.base_layer.quant_method.apply(self.base_layer, x, bias)", _ACTIVE),
    ),
    Expected(
        _UNQUANTISED, "UnquantizedLinearMethod.apply", ("self", "layer", "x", "bias"),
        ("return F.linear(x, layer.weight, bias)",),
    ),
    # the pool: A packed by live rank, B in columns, and who hears of new contents
    Expected(
        _POOL, "LoRAMemoryPool.load_lora_weight_to_buffer",
        code=("target_buffer[buffer_id, :lora_rank * c, :]",
              "target_buffer[buffer_id, :, :lora_rank]"),
    ),
    Expected(_POOL, "LoRAMemoryPool.remove_lora", ("self", "uid")),
    Expected(
        _MANAGER, "LoRAManager._notify_lora_slots_updated", ("self", "slot_ids"),
        ("getattr(module, 'on_lora_slots_updated', None)",),
    ),
    Expected(
        _MANAGER, "LoRAManager.fetch_new_loras", ("self", "new_loras", "running_loras"),
        ("self._notify_lora_slots_updated(changed_slots)",),
    ),
    Expected(
        _MANAGER, "LoRAManager.prepare_lora_batch", ("self", "forward_batch"),
        ("lora_ranks[weight_index] = lora.config.r", "scalings[weight_index] = lora.scaling"),
    ),
)  # fmt: skip
