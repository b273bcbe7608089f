"""Random small problems of every op, each with its float64 result, for ``loraplex check``."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import loraplex as lp

# of a layer like a model's and an odd one, in one set of random cases
LAYER_PAIRS = 2
OPS = ("multi_lora", "add_lora", "lora_linear", "matmul", "fused_matmul_expand")
MIXES = ("distinct", "uniform", "zipf", "identical")
RANKS = (0, 1, 2, 3, 4, 5, 8, 12, 16, 24, 31, 32, 33, 48, 64)
WIDE_RANKS = (96, 128, 200, 256)


@dataclass(frozen=True)
class Case:
    """One op on one random problem.

    Attributes:
        ranks: one per slot; mix: which slots occur, as in :func:`draw_indices`.
        base_share: part of the tokens that use no adapter.
    """

    op: str
    m: int
    k: int
    slices: tuple[int, ...]
    ranks: tuple[int, ...]
    mix: str
    base_share: float
    dtype: torch.dtype
    index_dtype: torch.dtype
    seed: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        widths = "+".join(str(width) for width in self.slices)
        ranks = ",".join(str(rank) for rank in self.ranks)
        return (
            f"{self.op} {dtype} M={self.m} K={self.k} N={widths} ranks={ranks} {self.mix} "
            f"base={self.base_share:.0%} seed={self.seed}"
        )


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case; pools hold NaN past each rank, which must never reach a result."""

    x: Tensor
    weight: Tensor
    a_pool: Tensor
    b_pool: Tensor
    scaling: Tensor
    indices: Tensor
    y: Tensor
    b: Tensor


def four_tokens() -> Case:
    """The example of four tokens and three adapters of rank 16; its indices are [2, 0, 1, 2]."""
    ranks, f32, i64 = (16, 16, 16), torch.float32, torch.int64
    return Case("multi_lora", 4, 128, (256,), ranks, "four tokens", 0.0, f32, i64, 0)


def random_cases(
    count: int, dtypes: Sequence[torch.dtype], *, is_small: bool, seed: int = 0
) -> list[Case]:
    """``count`` problems that go round all ops, dtypes and mixes, on a few layers.

    A layer is a K, slices and ranks, what kernels are compiled for; batches differ in everything
    else.

    Args:
        is_small: sizes for Triton's interpreter, which takes milliseconds a program.
    """
    draw = random.Random(seed)
    most_tokens = 20 if is_small else 150
    layers = [_draw_layer(draw, is_even, is_small) for is_even in (True, False) * LAYER_PAIRS]
    cases = []
    for number in range(count):
        k, slices, ranks = draw.choice(layers)
        cases.append(
            Case(
                op=OPS[number % len(OPS)],
                m=draw.choice([1, 2, 15, 16, 17, draw.randint(1, most_tokens)]),
                k=k,
                slices=slices,
                ranks=ranks,
                mix=MIXES[number // len(OPS) % len(MIXES)],
                base_share=draw.choice([0.0, 0.3, 1.0 if number % 7 == 0 else 0.5]),
                dtype=dtypes[number // (len(OPS) * len(MIXES)) % len(dtypes)],
                index_dtype=draw.choice([torch.int32, torch.int64]),
                seed=number,
            )
        )
    return cases


def _draw_layer(
    draw: random.Random, is_even: bool, is_small: bool
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """K, slices and ranks: either whole vectors everywhere, like a model's, or odd sizes that no
    block divides, which are the ones that go wrong.
    """
    most_features, most_slots = (80, 5) if is_small else (500, 12)
    ranks = [rank for rank in RANKS if not is_even or rank % 8 == 0]
    if not is_small:
        ranks += [rank for rank in WIDE_RANKS if not is_even or rank % 8 == 0]

    def width() -> int:
        return 32 * draw.randint(1, most_features // 32) if is_even else draw.randint(1, 80)

    return (
        2 * width() if is_even else width(),
        tuple(width() for _ in range(draw.choice([1, 2, 3]))),
        tuple(draw.sample(ranks, min(len(ranks), most_slots))),
    )


def draw_indices(mix: str, m: int, num_adapters: int, generator: torch.Generator) -> Tensor:
    """Slots of m tokens: all different, evenly drawn, a few popular ones, or one for all.

    Example:
        >>> draw_indices("identical", 3, 1, torch.Generator()).tolist()
        [0, 0, 0]
    """
    if mix == "four tokens":
        return torch.tensor([2, 0, 1, 2])
    if mix == "distinct":
        order = torch.randperm(max(m, num_adapters), generator=generator)
        return order[:m] % num_adapters
    if mix == "uniform":
        return torch.randint(num_adapters, (m,), generator=generator)
    if mix == "zipf":
        weights = 1.0 / torch.arange(1, num_adapters + 1) ** 1.5
        return torch.multinomial(weights, m, replacement=True, generator=generator)
    if mix == "identical":
        return torch.randint(num_adapters, (1,), generator=generator).expand(m).contiguous()
    raise ValueError(f"mix must be one of {', '.join(MIXES)}, got {mix!r}")


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """The tensors of a case, drawn on the CPU so that every machine gets the same numbers."""
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*size: int) -> Tensor:
        values = torch.randn(*size, generator=generator) / math.sqrt(max(1, size[-1]))
        return values.to(case.dtype)

    n, top, count = sum(case.slices), max(case.ranks), len(case.ranks)
    x = torch.randn(case.m, case.k, generator=generator).to(case.dtype)
    a_pool = draw(count, len(case.slices) * top, case.k)
    b_pool = draw(count, n, top)
    for slot, rank in enumerate(case.ranks):
        a_pool[slot].view(len(case.slices), top, case.k)[:, rank:] = torch.nan
        b_pool[slot, :, rank:] = torch.nan
    indices = draw_indices(case.mix, case.m, count, generator)
    is_base = torch.rand(case.m, generator=generator) < case.base_share
    indices = torch.where(is_base, -1, indices).to(case.index_dtype)
    scaling = torch.rand(count, generator=generator) * 2 + 0.25
    rank = max(1, top)
    tensors = (
        x, draw(n, case.k), a_pool, b_pool, scaling, indices, draw(case.m, rank), draw(rank, n),
    )  # fmt: skip
    return Inputs(*(tensor.to(device) for tensor in tensors))


def compute(case: Case, inputs: Inputs, impl: str) -> Tensor:
    """What loraplex gives."""
    x, weight = inputs.x, inputs.weight
    if case.op == "matmul":
        return lp.matmul(x, weight.T, impl=impl)
    if case.op == "fused_matmul_expand":
        return lp.fused_matmul_expand(x, weight.T, inputs.y, inputs.b, impl=impl)
    ranks = torch.tensor(case.ranks)
    pools = (inputs.a_pool, inputs.b_pool)
    if case.op == "multi_lora":
        return lp.multi_lora(
            x, *pools, inputs.indices, inputs.scaling, ranks, slices=case.slices, impl=impl
        )
    table = lp.AdapterTable.from_pools(*pools, case.slices, inputs.scaling, ranks)
    routing = lp.Routing.from_indices(inputs.indices, num_adapters=len(case.ranks))
    if case.op == "add_lora":
        return lp.add_lora_(x @ weight.T, x, table, routing, impl=impl)
    return lp.lora_linear(x, weight, table, routing, impl=impl)


def expect(case: Case, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The op by its definition, adapter by adapter, in one dtype: base part and LoRA part."""
    x = inputs.x.to(dtype)
    base = x @ inputs.weight.to(dtype).T
    if case.op == "matmul":
        return base, torch.zeros_like(base)
    if case.op == "fused_matmul_expand":
        return base, inputs.y.to(dtype) @ inputs.b.to(dtype)
    delta = torch.zeros_like(base)
    top = max(case.ranks)
    for slot, rank in enumerate(case.ranks):
        rows = (inputs.indices == slot).nonzero()[:, 0]
        start = 0
        for part, width in enumerate(case.slices):
            a = inputs.a_pool[slot, part * top : part * top + rank].to(dtype)
            b = inputs.b_pool[slot, start : start + width, :rank].to(dtype)
            product = ((x[rows] @ a.T) @ b.T) * inputs.scaling[slot].to(dtype)
            delta[rows, start : start + width] = product
            start += width
    return (torch.zeros_like(base) if case.op == "multi_lora" else base), delta


def rounding_slack(case: Case, base: Tensor, delta: Tensor) -> float:
    """Error that any order of the same sums may make, where eager happened to be lucky.

    A sum of K products in float32 errs by about sqrt(K) roundings of its terms' size; the LoRA
    part is rounded once more in between, and the result at the end, in the dtype.
    """
    size = max(float(base.abs().max()), float(delta.abs().max()), 1.0)
    inner = torch.finfo(torch.float32).eps * math.sqrt(case.k + max(case.ranks))
    return size * (inner + torch.finfo(case.dtype).eps)
