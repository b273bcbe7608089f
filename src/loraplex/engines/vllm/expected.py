"""What the plugin takes for granted in vLLM's sources, name by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """One class or function, and what must hold for it.

    Attributes:
        files: where it is, relative to the package; the first that exists counts.
        parameters: names of its parameters with their stars, None if they do not matter.
        says: lines of its code, as ``ast.unparse`` spells them, that our code relies on.
        never_says: lines that would make our code wrong.
    """

    files: tuple[str, ...]
    name: str
    parameters: tuple[str, ...] | None = None
    says: tuple[str, ...] = ()
    never_says: tuple[str, ...] = ()


_MANAGER = ("lora/model_manager.py",)
_BASE = ("lora/layers/base_linear.py",)
_COLUMN = ("lora/layers/column_parallel_linear.py",)
_ROW = ("lora/layers/row_parallel_linear.py",)
_REPLICATED = ("lora/layers/replicated_linear.py",)
_EMBEDDING = (
    "lora/layers/vocab_parallel_embedding.py",
    "lora/layers/vocal_parallel_embedding.py",  # before 0.29
)
_LOGITS = ("lora/layers/logits_processor.py",)
_PUNICA = ("lora/punica_wrapper/punica_base.py",)
_PUNICA_GPU = ("lora/punica_wrapper/punica_gpu.py",)
_META = ("lora/ops/triton_ops/lora_kernel_metadata.py",)
_LINEAR = ("model_executor/layers/linear.py",)

_SET = ("self", "index", "lora_a", "lora_b")
_RESET = ("self", "index")
_APPLY = ("self", "x", "bias")

EXPECTED = (
    # where layers and wrappers are made
    Expected(
        _MANAGER,
        "LoRAModelManager.__init__",
        (
            "self",
            "model",
            "max_num_seqs",
            "max_num_batched_tokens",
            "vocab_size",
            "lora_config",
            "device",
            "vllm_config",
        ),
        says=("self.modules: dict[str, BaseLayerWithLoRA] = {}", "self.lora_config = lora_config"),
    ),
    Expected(
        _MANAGER, "LoRAModelManager._init_punica_wrapper", says=("self.punica_wrapper_mapping",)
    ),
    Expected(
        _MANAGER,
        "LoRAModelManager.lora_slots",
        ("self",),
        says=("return self.lora_config.max_loras",),
    ),
    Expected(
        _MANAGER,
        "LoRAModelManager.activate_adapter",
        ("self", "lora_id"),
        says=("module.reset_lora(index)", "module.set_lora("),
    ),
    Expected(
        _MANAGER,
        "LoRAModelManager.set_adapter_mapping",
        ("self", "mapping"),
        says=("if self._last_mapping != mapping", "self._set_adapter_mapping(mapping)"),
    ),
    Expected(
        _MANAGER,
        "LoRAModelManager._set_adapter_mapping",
        ("self", "mapping"),
        says=(
            "punica_wrapper.update_metadata(mapping, self.lora_index_to_id, self.lora_slots + 1, "
            "self.vocab_size)",
        ),
    ),
    # the mapping of a step
    Expected(
        ("lora/layers/utils.py",),
        "LoRAMapping",
        says=(
            "index_mapping: tuple[int, ...]",
            "prompt_mapping: tuple[int, ...]",
            "is_prefill: bool",
        ),
    ),
    Expected(
        ("lora/punica_wrapper/utils.py",),
        "convert_mapping",
        says=("if x > 0 else -1", "if index_mapping_indices[i] > 0 else 0"),
    ),
    Expected(
        _PUNICA,
        "PunicaWrapperBase.__init__",
        says=(
            "self._token_lora_indices = torch.empty(max_num_batched_tokens",
            "self._sampler_indices = ",
            "self._sampler_indices_padded = ",
            "self._embeddings_indices = ",
            "self.indices_len: list[int | None] = [None] * 4",
            "self.is_prefill = False",
            "self.device: torch.device = device",
        ),
    ),
    Expected(
        _PUNICA_GPU,
        "PunicaWrapperGPU.update_metadata",
        ("self", "mapping", "lora_index_to_id", "max_loras", "vocab_size", "**kwargs"),
        says=(
            "self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)",
            "self.token_mapping_meta.prepare_tensors(self.token_lora_indices)",
            "self.prompt_mapping_meta.prepare_tensors(self.sampler_indices)",
        ),
    ),
    Expected(
        _META,
        "LoRAKernelMeta._reset",
        ("self",),
        says=("self.active_lora_ids.fill_(-1)", "self.no_lora_flag_cpu.fill_(False)"),
    ),
    Expected(
        _META,
        "LoRAKernelMeta.prepare_tensors",
        ("self", "token_lora_mapping"),
        says=("self._reset()", "self.no_lora_flag_cpu[0] = no_lora"),
    ),
    *(
        Expected((f"lora/ops/triton_ops/lora_{op}_op.py",), f"_lora_{op}", says=(flag,))
        for op in ("shrink", "expand")
        for flag in ("if no_lora_flag_cpu.item():",)
    ),
    # linear layers
    Expected(_BASE, "BaseLinearLayerWithLoRA.__init__", ("self", "base_layer")),
    Expected(
        _BASE,
        "BaseLinearLayerWithLoRA.create_lora_weights",
        says=(
            "torch.zeros(max_loras, 1, lora_a_out_size, self.input_size",
            "torch.zeros(max_loras, 1, lora_b_out_size, lora_config.max_lora_rank",
        ),
    ),
    Expected(
        _BASE,
        "BaseLinearLayerWithLoRA.set_lora",
        _SET,
        says=("self.reset_lora(index)", "self.lora_a_stacked[0][index, 0, :lora_a.shape[0]"),
    ),
    Expected(
        _BASE,
        "BaseLinearLayerWithLoRA.reset_lora",
        _RESET,
        says=("self.lora_a_stacked[s_index][index] = 0", "self.lora_b_stacked[s_index][index] = 0"),
    ),
    Expected(
        _BASE,
        "BaseLinearLayerWithLoRA.apply",
        _APPLY,
        says=("if self._enable_aux_cuda_stream", "return self._apply_sync(x, bias)"),
    ),
    Expected(
        _BASE,
        "BaseLinearLayerWithLoRA._apply_sync",
        _APPLY,
        says=(
            "self._get_quant_method().apply(self.base_layer, x, bias)",
            "self._apply_lora_to_output(",
        ),
    ),
    Expected(_BASE, "BaseLinearLayerWithLoRA._apply_lora_to_output", ("self", "x", "output")),
    Expected(
        _COLUMN,
        "MergedColumnParallelLinearWithLoRA.create_lora_weights",
        says=("torch.zeros(max_loras, 1, output_size, lora_config.max_lora_rank",),
    ),
    Expected(
        _COLUMN,
        "MergedColumnParallelLinearWithLoRA.set_lora",
        _SET,
        says=(
            "self.reset_lora(index)",
            "self.expand_packed_lora(lora_a, lora_b)",
            "self.lora_a_stacked[i][index, 0, :lora_a_i.shape[0]",
        ),
    ),
    Expected(
        _COLUMN,
        "MergedColumnParallelLinearWithLoRA.expand_packed_lora",
        ("self", "lora_a", "lora_b"),
    ),
    Expected(_COLUMN, "MergedColumnParallelLinearWithLoRA.apply", _APPLY),
    Expected(_COLUMN, "MergedColumnParallelLinearVariableSliceWithLoRA.set_lora", _SET),
    Expected(_COLUMN, "QKVParallelLinearWithLoRA", never_says=("def apply", "def set_lora")),
    Expected(_COLUMN, "MergedQKVParallelLinearWithLoRA", never_says=("def apply", "def set_lora")),
    Expected(
        _COLUMN,
        "ColumnParallelLinearWithLoRA.forward",
        says=("output_parallel = self.apply(input_, bias)",),
    ),
    Expected(
        _ROW,
        "RowParallelLinearWithLoRA.forward",
        says=("output_parallel = self.apply(input_parallel, bias_)",),
    ),
    Expected(
        _REPLICATED,
        "ReplicatedLinearWithLoRA.forward",
        says=("output = self.apply(input_, bias)",),
    ),
    Expected(_REPLICATED, "ReplicatedLinearWithLoRA.apply", _APPLY),
    # base layers
    *(
        Expected(_LINEAR, name)
        for name in (
            "ReplicatedLinear",
            "ColumnParallelLinear",
            "MergedColumnParallelLinear",
            "QKVParallelLinear",
            "RowParallelLinear",
        )
    ),
    Expected(
        _LINEAR,
        "UnquantizedLinearMethod.create_weights",
        says=("sum(output_partition_sizes)", "layer.register_parameter('weight', weight)"),
    ),
    Expected(_LINEAR, "UnquantizedLinearMethod.apply", ("self", "layer", "x", "bias")),
    # layers on vLLM's own path
    *(
        Expected(files, f"{name}.{method}", parameters, says)
        for files, name in (
            (_EMBEDDING, "VocabParallelEmbeddingWithLoRA"),
            (_LOGITS, "LogitsProcessorWithLoRA"),
        )
        for method, parameters, says in (
            ("set_lora", _SET, ("self.reset_lora(index)",)),
            ("reset_lora", _RESET, ("self.lora_b_stacked[index] = 0",)),
        )
    ),
    # the key of the cache of compiled graphs
    Expected(
        ("config/vllm.py",), "VllmConfig.compute_hash", says=("json.dumps(additional_config",)
    ),
    Expected(("envs.py",), "environment_variables", says=("'VLLM_BATCH_INVARIANT'",)),
)
