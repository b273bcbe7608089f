"""y += scaling * v B^T in one pass over an output that exists already."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loraplex.kernels.launch import launch
from loraplex.kernels.tile import (
    expand_tile,
    finish_rows,
    load_groups_of_places,
    locate_slice,
)


@triton.jit(do_not_specialize=["stride_vk", "num_tokens"])
def expand_kernel(
    y_ptr, stride_ym, stride_yn,
    bias_ptr,
    entries_ptr, stride_el,
    stride_br,
    v_ptr, stride_vk, stride_vm, stride_vs,
    groups_ptr, stride_gt, stride_gs,
    indices_ptr,
    places_ptr,
    plan_ptr,
    num_tokens,
    SLICES: tl.constexpr,
    V_SPLIT_K: tl.constexpr,
    V_GROUPS: tl.constexpr,
    RANK_MULTIPLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_COLUMN_SCALE: tl.constexpr,
    HAS_ADAPTER_BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LORA_STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y = column_scale * (y - bias + scaling * v B^T) + bias + adapter_bias, base rows untouched.

    y [M, N]; v and groups from the shrink; bias is what y holds already.
    """
    # which tile; a tile without adapters is left alone
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    part, start, width, first = locate_slice(tl.program_id(1), SLICES, BLOCK_N)
    column = first + tl.arange(0, BLOCK_N)
    tile = tl.program_id(0) * BLOCK_M // TILE_M
    if tl.load(plan_ptr + tile * (16 + 4 * TILE_M)) == 0:
        return

    safe_row = tl.minimum(row, num_tokens - 1).to(tl.int64)
    safe_column = tl.minimum(column, width - 1).to(tl.int64)
    groups = load_groups_of_places(entries_ptr, stride_el, plan_ptr, tile, part, TILE_M, PLACES)
    row_place = tl.load(places_ptr + safe_row)

    # y and v are final once everything before has finished
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    delta = expand_tile(
        tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32),
        v_ptr, stride_vk, stride_vm, stride_vs,
        groups_ptr, stride_gt, stride_gs,
        stride_br,
        safe_row, row_place, safe_column, tile, part, tl.sum(groups, axis=0), 0,
        V_SPLIT_K, V_GROUPS, RANK_MULTIPLE, BLOCK_M, BLOCK_N, BLOCK_R, False, LORA_STAGES,
        y_ptr.dtype.element_ty, PRECISION,
    )  # fmt: skip

    # only rows with an adapter are read and written, so base rows keep their bits
    has_adapter = (row_place >= 0) & (row < num_tokens)
    target = y_ptr + row.to(tl.int64)[:, None] * stride_ym
    target += (start + column).to(tl.int64)[None, :] * stride_yn
    mask = has_adapter[:, None] & (column < width)[None, :]
    base = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + start + column, mask=column < width, other=0.0)
        base -= bias.to(tl.float32)[None, :]
    acc = finish_rows(
        base + delta,
        entries_ptr, stride_el,
        indices_ptr,
        bias_ptr,
        num_tokens, row, column, part, start, width,
        HAS_BIAS, HAS_COLUMN_SCALE, HAS_ADAPTER_BIAS,
    )  # fmt: skip
    tl.store(target, acc.to(y_ptr.dtype.element_ty), mask=mask)


def launch_expand(
    y: Tensor,
    bias: Tensor | None,
    entries: Tensor,
    stride_br: int,
    v: Tensor,
    groups: Tensor,
    indices: Tensor,
    places: Tensor,
    plan: Tensor,
    *,
    slices: tuple[int, ...],
    rank_multiple: int,
    has_column_scale: bool,
    has_adapter_bias: bool,
    tile_m: int,
    num_places: int,
    precision: str,
    is_dependent: bool,
    block_m: int,
    block_n: int,
    block_r: int,
    lora_stages: int,
    num_warps: int,
    num_stages: int,
) -> None:
    """Add the adapters' part to ``y`` [M, N] in place; ``bias`` or None is what y holds already."""
    num_tokens = y.shape[0]
    column_blocks = sum(-(-width // block_n) for width in slices)
    launch(
        expand_kernel, (-(-num_tokens // block_m), column_blocks),
        y, y.stride(0), y.stride(1),
        bias if bias is not None else y,
        entries, entries.stride(0),
        stride_br,
        v, v.stride(0), v.stride(1), v.stride(2),
        groups, groups.stride(0), groups.stride(1),
        indices,
        places,
        plan,
        num_tokens,
        SLICES=slices,
        V_SPLIT_K=v.shape[0],
        V_GROUPS=v.shape[3] // 8,
        RANK_MULTIPLE=rank_multiple,
        HAS_BIAS=bias is not None,
        HAS_COLUMN_SCALE=has_column_scale,
        HAS_ADAPTER_BIAS=has_adapter_bias,
        TILE_M=tile_m,
        PLACES=num_places,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        LORA_STAGES=lora_stages,
        PDL=is_dependent,
        PRECISION=precision,
        num_warps=num_warps,
        num_stages=num_stages,
        **({"launch_pdl": True} if is_dependent else {}),
    )  # fmt: skip
