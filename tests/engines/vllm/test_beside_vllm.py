"""An installed vLLM's own manager and layers on a GPU: its own kernels, then ours, beside float64.

Runs where vLLM and a GPU are: ``pytest tests/engines/vllm/test_beside_vllm.py``.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loraplex.engines.vllm.adopt import adopt, make_plan
from loraplex.engines.vllm.layers import fused

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
DTYPE = torch.bfloat16
HIDDEN, KV, FFN, SLOTS, MAX_RANK = 512, 256, 1024, 4, 32
SHAPES = {
    "q_proj": (HIDDEN, HIDDEN), "k_proj": (HIDDEN, KV), "v_proj": (HIDDEN, KV),
    "o_proj": (HIDDEN, HIDDEN), "gate_proj": (HIDDEN, FFN), "up_proj": (HIDDEN, FFN),
    "down_proj": (FFN, HIDDEN), "router": (HIDDEN, 24), "plain": (HIDDEN, 48),
}  # fmt: skip
PARTS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"],
    "o_proj": ["o_proj"], "down_proj": ["down_proj"], "router": ["router"], "plain": ["plain"],
}  # fmt: skip
# adapter id -> rank and modules; 2 and 3 leave slices of packed layers out
ADAPTERS = {
    1: (32, list(SHAPES)),
    2: (5, ["q_proj", "v_proj", "up_proj", "plain"]),
    3: (8, ["k_proj", "router", "down_proj"]),
    4: (16, list(SHAPES)),
}
STEPS = {
    "mixed": [1, 0, 2, 3, 1, 4, 0],
    "one": [4],
    "base": [0] * 6,
    "decode": [1 + i % 4 for i in range(64)],
    "prefill": [1] * 300 + [0] * 50 + [3] * 150 + [2] * 37,
}


@pytest.fixture(scope="module")
def vllm_config() -> Iterator[Any]:
    """vLLM's world of one rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with set_current_vllm_config(VllmConfig()) as config:
        parallel_state.init_distributed_environment(
            1, 0, f"tcp://127.0.0.1:{port}", 0, backend="nccl"
        )
        parallel_state.initialize_model_parallel(1, 1)
        yield config
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def make_model() -> nn.Module:
    """One layer's linear modules, of every kind."""
    from vllm.model_executor.layers import linear

    class Model(nn.Module):
        packed_modules_mapping = {k: v for k, v in PARTS.items() if len(v) > 1}  # noqa: RUF012
        embedding_modules: dict[str, str] = {}  # noqa: RUF012
        supports_lora, is_pooling_model = True, False
        is_3d_moe_weight = is_non_gated_moe = False
        lora_skip_prefixes: list[str] = []  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace()
            heads, kv_heads = HIDDEN // 64, KV // 64
            self.qkv_proj = linear.QKVParallelLinear(
                HIDDEN, 64, heads, kv_heads, bias=True, prefix="qkv_proj"
            )
            self.o_proj = linear.RowParallelLinear(HIDDEN, HIDDEN, bias=False, prefix="o_proj")
            self.gate_up_proj = linear.MergedColumnParallelLinear(
                HIDDEN, [FFN, FFN], bias=False, prefix="gate_up_proj"
            )
            self.down_proj = linear.RowParallelLinear(FFN, HIDDEN, bias=False, prefix="down_proj")
            self.router = linear.ReplicatedLinear(HIDDEN, 24, bias=True, prefix="router")
            self.plain = linear.ColumnParallelLinear(HIDDEN, 48, bias=False, prefix="plain")

    torch.manual_seed(0)
    model = Model()
    for parameter in model.parameters():
        parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    return model


def make_manager(device: torch.device, dtype: torch.dtype = DTYPE) -> Any:
    """A manager with its adapters loaded, on vLLM's own path."""
    from vllm.config.lora import LoRAConfig
    from vllm.lora.model_manager import LRUCacheLoRAModelManager

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = make_model()
    finally:
        torch.set_default_dtype(before)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=dtype),
        additional_config={},
        parallel_config=SimpleNamespace(enable_expert_parallel=False),
    )
    lora = LoRAConfig(
        max_lora_rank=MAX_RANK, max_loras=SLOTS, max_cpu_loras=SLOTS, lora_dtype=dtype
    )
    return LRUCacheLoRAModelManager(
        model=model, max_num_seqs=64, max_num_batched_tokens=1024, vocab_size=100,
        lora_config=lora, device=device, vllm_config=config,
    )  # fmt: skip


def load_adapters(manager: Any) -> dict[int, dict[str, tuple[Tensor, Tensor]]]:
    """Load all adapters into their slots.

    Returns:
        A and scaled B of every module in float64, by adapter id.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    device, dtype = manager.device, manager.lora_config.lora_dtype
    exact: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}
    for number, (rank, names) in ADAPTERS.items():
        generator = torch.Generator().manual_seed(number)
        weights = {}
        for name in names:
            k, n = SHAPES[name]
            a = (torch.randn(rank, k, generator=generator) * k**-0.5).to(dtype)
            b = (torch.randn(n, rank, generator=generator) * rank**-0.5).to(dtype)
            # alpha is twice the rank, and times two is exact
            weights[name] = LoRALayerWeights(name, rank, 2 * rank, a, b)
            exact.setdefault(number, {})[name] = (a.double().to(device), 2 * b.double().to(device))
        manager.add_adapter(LoRAModel(number, rank, weights))
        manager.activate_adapter(number)
    return exact


def outputs(manager: Any, ids: list[int], x: dict[str, Tensor]) -> dict[str, Tensor]:
    from vllm.lora.layers import LoRAMapping

    manager._last_mapping = None
    manager.set_adapter_mapping(LoRAMapping(tuple(ids), tuple(ids), is_prefill=True))
    found = {}
    for name in PARTS:
        y = manager.modules[name](x[name])
        found[name] = (y[0] if isinstance(y, tuple) else y).clone()
    return found


def truth(manager: Any, ids: list[int], x: dict[str, Tensor], exact: Any) -> dict[str, Tensor]:
    found = {}
    for name, parts in PARTS.items():
        base, rows = manager.modules[name].base_layer, x[name].double()
        y = rows @ base.weight.double().T
        if base.bias is not None:
            y = y + base.bias.double()
        widths = [SHAPES[part][1] for part in parts]
        for row, number in enumerate(ids):
            start = 0
            for part, width in zip(parts, widths, strict=True):
                if part in exact.get(number, {}):
                    a, b = exact[number][part]
                    y[row, start : start + width] += (rows[row] @ a.T) @ b.T
                start += width
        found[name] = y
    return found


@pytest.mark.parametrize("step", STEPS)
def test_as_exact_as_vllm(vllm_config: Any, device: torch.device, step: str) -> None:
    ids = STEPS[step]
    own, ours = make_manager(device), make_manager(device)
    impl = "auto" if device.type == "cuda" else "triton"
    plan = make_plan(ours)
    assert plan.count(fused) == len(PARTS)
    adopt(ours, SimpleNamespace(additional_config={}), plan, impl=impl)
    exact = load_adapters(own)
    load_adapters(ours)
    x = {
        name: torch.randn(len(ids), SHAPES[parts[0]][0], device=device).to(DTYPE)
        for name, parts in PARTS.items()
    }
    wanted = truth(own, ids, x, exact)
    theirs, mine = outputs(own, ids, x), outputs(ours, ids, x)
    for name in PARTS:
        assert torch.isfinite(mine[name]).all()
        limit = 2 * (theirs[name].double() - wanted[name]).abs().max()
        limit += torch.finfo(DTYPE).eps * wanted[name].abs().max()
        assert (mine[name].double() - wanted[name]).abs().max() <= limit, name
