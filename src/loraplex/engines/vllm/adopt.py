"""Which of an engine's layers run on our kernels, and how they change over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from loraplex import env
from loraplex.counters import reserve_counters
from loraplex.engines.vllm.layers import Maker, added, change_class, fused, watched
from loraplex.engines.vllm.op import AdoptedLayer
from loraplex.engines.vllm.rehearsal import rehearse
from loraplex.engines.vllm.slots import LayerSlots
from loraplex.engines.vllm.step import Step
from loraplex.engines.vllm.wrapper import OwnPath, routed
from loraplex.version import __version__

WRAPPER = "PunicaWrapperGPU"
# classes of vllm.lora.layers; their variants for fully sharded adapters communicate in between
LINEAR = (
    "ReplicatedLinearWithLoRA",
    "ColumnParallelLinearWithLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "MergedColumnParallelLinearVariableSliceWithLoRA",
    "QKVParallelLinearWithLoRA",
    "MergedQKVParallelLinearWithLoRA",
    "RowParallelLinearWithLoRA",
)
# classes of vllm.model_executor.layers.linear; subclasses may have a forward of their own
BASES = (
    "ReplicatedLinear",
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
)
UNQUANTIZED = "UnquantizedLinearMethod"
WATCHED = ("VocabParallelEmbeddingWithLoRA", "LogitsProcessorWithLoRA")


@dataclass
class Plan:
    """What will change, decided before anything does.

    Attributes:
        makers: by module name, what makes the layer's new class.
        own: names of layers on vLLM's own path, with vLLM's metadata for all tokens.
    """

    makers: dict[str, Maker] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)

    def count(self, maker: Maker) -> int:
        """How many layers change this way."""
        return sum(one is maker for one in self.makers.values())


def why_not(manager: Any, vllm_config: Any, *, is_batch_invariant: bool) -> str:
    """Why this engine's LoRA stays on vLLM's own path; empty if it need not."""
    wrappers = list(manager.punica_wrapper_mapping.values())
    others = {type(w).__name__ for w in wrappers} - {WRAPPER}
    if others:
        return f"the LoRA backend here is {', '.join(sorted(others))}, not {WRAPPER}"
    if is_batch_invariant:
        return "VLLM_BATCH_INVARIANT is set"
    dtype, lora_dtype = vllm_config.model_config.dtype, manager.lora_config.lora_dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the model's dtype is {dtype}, not bfloat16 or float16"
    if lora_dtype != dtype:
        return f"lora_dtype is {lora_dtype}, the model's is {dtype}"
    if not isinstance(vllm_config.additional_config, dict):
        return "additional_config is not a dict"
    return _why_not_here(torch.device(wrappers[0].device))


def _why_not_here(device: torch.device) -> str:
    if not env.has_triton():
        return "triton is not installed"
    if device.type != "cuda" or torch.version.hip:
        return f"the device is {device}, not an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{env.gpu_arch(device.index or 0)} is older than sm_80"
    return ""


def make_plan(manager: Any) -> Plan:
    """Decide each of the manager's modules by itself."""
    plan = Plan()
    for name, layer in manager.modules.items():
        maker = _maker_for(layer, manager.lora_config.lora_dtype)
        if maker is None:
            plan.own.append(name)
        else:
            plan.makers[name] = maker
    return plan


def _maker_for(layer: Any, dtype: torch.dtype) -> Maker | None:
    kind = type(layer).__name__
    if kind in WATCHED:
        return watched
    base: Any = getattr(layer, "base_layer", None)
    if kind not in LINEAR or type(base).__name__ not in BASES:
        return None
    tensors = (*layer.lora_a_stacked, *layer.lora_b_stacked)
    if any(t.dtype != dtype or t.ndim != 4 or not t.is_contiguous() for t in tensors):
        return None
    if type(base.quant_method).__name__ != UNQUANTIZED:
        return added
    weight = getattr(base, "weight", None)
    shape = (sum(b.shape[2] for b in layer.lora_b_stacked), layer.lora_a_stacked[0].shape[3])
    is_plain = weight is not None and weight.dtype == dtype and tuple(weight.shape) == shape
    return fused if is_plain else added


def adopt(
    manager: Any, vllm_config: Any, plan: Plan, *, impl: str = "auto", is_rehearsed: bool = False
) -> None:
    """Change the planned layers and their wrappers over, or leave everything as it was.

    Args:
        impl: implementation that the layers ask for.
        is_rehearsed: whether each kind of layer is run before.

    Raises:
        Exception: whatever went wrong; nothing has changed then.
    """
    steps = {
        id(wrapper): Step(
            wrapper._token_lora_indices.shape[0], manager.lora_slots, wrapper.device, impl
        )
        for wrapper in manager.punica_wrapper_mapping.values()
    }
    layers = {
        name: AdoptedLayer(
            LayerSlots(manager.modules[name].lora_a_stacked, manager.modules[name].lora_b_stacked),
            steps[id(manager.modules[name].punica_wrapper)],
            is_fused=maker is fused,
        )
        for name, maker in plan.makers.items()
        if maker is not watched
    }
    if is_rehearsed:
        rehearse(layers, manager.modules)
    changed: list[tuple[Any, Any]] = []
    try:
        for name, maker in plan.makers.items():
            layer = manager.modules[name]
            if maker is watched:
                _watch(layer, manager)
            else:
                _attach(layer, layers[name])
            changed.append((layer, change_class(layer, maker)))
        for wrapper, own in _own_paths(manager, plan):
            wrapper._loraplex_step, wrapper._loraplex_own = steps[id(wrapper)], own
            changed.append((wrapper, change_class(wrapper, routed)))
    except BaseException:
        for one, old in reversed(changed):
            one.__class__ = old
        raise
    _keep_buffers(manager, plan, steps)
    # a graph from a cache that was filled without these layers must not be taken for this one
    vllm_config.additional_config["loraplex"] = __version__


def _attach(layer: Any, adopted: AdoptedLayer) -> None:
    layer._loraplex, layer._loraplex_handle = adopted, adopted.handle
    layer._enable_aux_cuda_stream = False


def _watch(layer: Any, manager: Any) -> None:
    def forget() -> None:
        # the next step's metadata is built even if its tokens use the same slots as now
        manager._last_mapping = None

    layer._loraplex_used, layer._loraplex_forget = set(), forget


def _own_paths(manager: Any, plan: Plan) -> Iterator[tuple[Any, OwnPath]]:
    """Each wrapper, and what stays on vLLM's own path behind it."""
    for wrapper in {id(w): w for w in manager.punica_wrapper_mapping.values()}.values():
        behind = {n: m for n, m in manager.modules.items() if m.punica_wrapper is wrapper}
        used = [m._loraplex_used for n, m in behind.items() if plan.makers.get(n) is watched]
        yield wrapper, OwnPath(None if set(plan.own) & behind.keys() else used)


def _keep_buffers(manager: Any, plan: Plan, steps: dict[int, Step]) -> None:
    """Make what kernels read part of the model: an engine that sleeps keeps its model's buffers."""
    homeless = dict(steps)
    for name, maker in plan.makers.items():
        layer = manager.modules[name]
        if maker is watched:
            continue
        buffers = {"entries": layer._loraplex.slots.table.entries}
        step = homeless.pop(id(layer.punica_wrapper), None)
        if step:
            counters = reserve_counters(buffers["entries"].device)
            buffers |= step.buffers() | ({} if counters is None else {"counters": counters})
        for label, tensor in buffers.items():
            layer.register_buffer(f"_loraplex_{label}", tensor, persistent=False)
