"""Other engines' LoRA kernels, for ``loraplex bench suite``, where they can be imported.

Metadata is built once per batch, outside the timing, as for loraplex. A peer whose interface has
changed fails with its own error, which the suite reports in place of a time.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from loraplex.bench.layers_batch import SCALING, Batch, Tensors
from loraplex.bench.suite_providers import Call, Provider


def peers() -> list[Provider]:
    """Those that are installed."""
    found = []
    if importlib.util.find_spec("vllm"):
        found.append(Provider("vllm", "whole", _vllm, "vLLM's shrink and expand, its defaults"))
    if importlib.util.find_spec("sglang"):
        about = "SGLang's csgmv backend (not its triton_v2, which needs SGLang's own runner)"
        found.append(Provider("sglang_csgmv", "whole", _csgmv, about))
    return found


def _from(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _vllm(batch: Batch, tensors: Tensors) -> Call:
    ops = "vllm.lora.ops.triton_ops"
    shrink = _from(f"{ops}.lora_shrink_op", "lora_shrink")
    expand = _from(f"{ops}.lora_expand_op", "lora_expand")
    device, parts = tensors.x.device, len(batch.layer.slices)
    meta = _from(f"{ops}.lora_kernel_metadata", "LoRAKernelMeta").make(
        batch.num_slots, batch.m, device
    )
    meta.prepare_tensors(tensors.routing.indices)
    arguments = meta.meta_args(batch.m, True)
    a_pool, b_pool = _zero_padded(batch, tensors)
    a = [part.contiguous().unsqueeze(1) for part in a_pool.chunk(parts, dim=1)]
    # the scaling belongs to B there
    b = [
        (part * SCALING).contiguous().unsqueeze(1)
        for part in b_pool.split_with_sizes(list(batch.layer.slices), dim=1)
    ]

    def call() -> Tensor:
        y = F.linear(tensors.x, tensors.weight)
        size = (parts, batch.m, batch.capacity)
        low = torch.empty(size, dtype=torch.float32, device=device)
        shrink(tensors.x, a, low, *arguments, 1.0)
        expand(low, b, y, *arguments, offset_start=0, add_inputs=True)
        return y

    return call


def _csgmv(batch: Batch, tensors: Tensors) -> Call:
    ops = "sglang.kernels.ops.lora.dense"
    shrink = _from(f"{ops}.chunked_sgmv_shrink", "chunked_sgmv_lora_shrink_forward")
    expand = _from(f"{ops}.chunked_sgmv_expand", "chunked_sgmv_lora_expand_forward")
    device, layer = tensors.x.device, batch.layer
    # rows by adapter, in chunks of at most so many
    most = 128 if batch.m >= 256 else 32 if batch.m >= 64 else 16
    chunks = [
        (slot, rows[start : start + most])
        for slot, rows in tensors.rows.items()
        for start in range(0, len(rows), most)
    ]
    lengths = torch.tensor([0, *(len(piece) for _, piece in chunks)], dtype=torch.int32)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    info = _from("sglang.srt.lora.utils", "LoRABatchInfo")(
        use_cuda_graph=False,
        bs=len(chunks),
        num_segments=len(chunks),
        seg_indptr=lengths.cumsum(0).to(torch.int32).to(device),
        weight_indices=ints([slot for slot, _ in chunks]),
        lora_ranks=ints(batch.ranks),
        scalings=torch.full((batch.num_slots,), SCALING, device=device),
        max_len=most,
        seg_lens=None,
        permutation=torch.cat([piece for _, piece in chunks]).to(torch.int32),
    )
    offsets = torch.tensor([0, *layer.slices], dtype=torch.int32).cumsum(0).to(torch.int32)
    on_device, widest = offsets.to(device), max(layer.slices)
    a_pool = _packed_a(batch, tensors)
    b_pool = _zero_padded(batch, tensors)[1]

    def call() -> Tensor:
        y = F.linear(tensors.x, tensors.weight)
        low = shrink(tensors.x, a_pool, info, num_slices=len(layer.slices))
        result: Tensor = expand(low, b_pool, info, on_device, widest, y, offsets)
        return result

    return call


def _zero_padded(batch: Batch, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """The pools, zero past each rank: engines that multiply the padding need it so."""
    if set(batch.ranks) == {batch.capacity}:
        return tensors.a_pool, tensors.b_pool
    a_pool, b_pool = tensors.a_pool.clone(), tensors.b_pool.clone()
    parts = a_pool.view(batch.num_slots, len(batch.layer.slices), batch.capacity, batch.layer.k)
    for slot, rank in enumerate(batch.ranks):
        parts[slot, :, rank:] = 0
        b_pool[slot, :, rank:] = 0
    return a_pool, b_pool


def _packed_a(batch: Batch, tensors: Tensors) -> Tensor:
    """A with slice s of an adapter in rows s * rank and on, as SGLang holds it."""
    if set(batch.ranks) == {batch.capacity}:
        return tensors.a_pool
    packed = torch.zeros_like(tensors.a_pool)
    parts, k = len(batch.layer.slices), batch.layer.k
    for slot, rank in enumerate(batch.ranks):
        rows = tensors.a_pool[slot].view(parts, batch.capacity, k)[:, :rank]
        packed[slot, : parts * rank] = rows.reshape(-1, k)
    return packed
