"""The tensors of one LoRA layer under the names of the ladder's maths.

With ``weight`` [N, K], ``a_pool`` [1, R, K] and ``b_pool`` [1, N, R] stored as a model and an
adapter store them, the maths names are views of them: X [M, K], C = weight.T [K, N],
A = a_pool[0].T [K, R], B = b_pool[0].T [R, N].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

import loraplex as lp

MAX_SETS = 8
TRUTH_BLOCK = 4096


@dataclass(frozen=True)
class Shape:
    """Size of the layer: M tokens, K in-features, N out-features, rank R."""

    m: int
    k: int
    n: int
    r: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("m", "k", "n", "r"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass
class Tensors:
    """One set of buffers; several sets in turn keep weights out of the cache."""

    x: Tensor
    weight: Tensor
    a_pool: Tensor
    b_pool: Tensor
    table: lp.AdapterTable
    routing: lp.Routing
    c: Tensor = field(init=False)
    a: Tensor = field(init=False)
    b: Tensor = field(init=False)
    y: Tensor = field(init=False)
    z: Tensor = field(init=False)
    w: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.c, self.a, self.b = self.weight.T, self.a_pool[0].T, self.b_pool[0].T
        self.y = self.x @ self.a
        self.z = self.y @ self.b
        self.w = self.x @ self.c


def make_sets(shape: Shape, device: torch.device) -> list[Tensors]:
    """As many sets of tensors as it takes to rotate past the L2 cache; one on the CPU."""
    count = 1
    if device.type == "cuda":
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 * 2**20)
        weights = shape.dtype.itemsize * (shape.n * shape.k + shape.r * (shape.n + shape.k))
        count = max(2, min(MAX_SETS, math.ceil(4 * cache / weights)))
    return [make_tensors(shape, device, seed) for seed in range(count)]


def make_tensors(shape: Shape, device: torch.device, seed: int) -> Tensors:
    """Random tensors whose products stay near one, so that float16 has room."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size: int) -> Tensor:
        values = torch.randn(*size, generator=generator, device=device)
        return (values / math.sqrt(size[-1])).to(shape.dtype)

    x = torch.randn(shape.m, shape.k, generator=generator, device=device).to(shape.dtype)
    a_pool, b_pool = draw(1, shape.r, shape.k), draw(1, shape.n, shape.r)
    table = lp.AdapterTable.from_pools(a_pool, b_pool)
    indices = torch.zeros(shape.m, dtype=torch.int32, device=device)
    routing = lp.Routing.from_indices(indices, num_adapters=1)
    return Tensors(x, draw(shape.n, shape.k), a_pool, b_pool, table, routing)


def make_truths(tensors: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
    """(eager, float64) of X C and of X C + X A B, in blocks of columns to bound the memory."""
    x, low = tensors.x.double(), tensors.x.double() @ tensors.a.double()
    base, whole = [], []
    for start in range(0, tensors.c.shape[1], TRUTH_BLOCK):
        columns = slice(start, start + TRUTH_BLOCK)
        base.append(x @ tensors.c[:, columns].double())
        whole.append(base[-1] + low @ tensors.b[:, columns].double())
    return {
        "base": (tensors.w, torch.cat(base, dim=1)),
        "whole": (tensors.x @ tensors.c + (tensors.x @ tensors.a) @ tensors.b, torch.cat(whole, 1)),
    }
