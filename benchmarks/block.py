"""A block of Llama-3-8B's four layers as a model runs them, with small kernels between.

    python benchmarks/block.py [--tokens 64] [--adapters 8]

Prints microseconds a block, in a CUDA graph over several blocks of their own weights: all layers
torch's, all ours, all ours with no adapter in the batch, and one layer ours at a time. In a sweep a
launch follows one of its kind and may begin before that one ends; here a normalisation or a product
comes before each, which lets nobody begin early.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import loraplex as lp

SHAPES = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
RANK, BLOCKS, REPLAYS, RUNS = 16, 6, 4, 15
Layer = Callable[[Tensor, int, str], Tensor]


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[1],))


def block(h: Tensor, number: int, layer: Layer) -> Tensor:
    """The four layers of one block; attention is left out."""
    heads = layer(normed(h), number, "qkv")
    h = h + layer(normed(heads[:, :4096].contiguous()), number, "o")
    both = layer(normed(h), number, "gate_up")
    return h + layer(F.silu(both[:, :14336]) * both[:, 14336:], number, "down")


def microseconds(layer: Layer, h: Tensor) -> float:
    """Median time of a block."""

    def run() -> None:
        y = h
        for number in range(BLOCKS):
            y = block(y, number, layer)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(RUNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / (REPLAYS * BLOCKS))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    options = parser.parse_args()

    def random(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale

    weights, tables = [], []
    for _ in range(BLOCKS):
        weights.append(
            {name: random(sum(widths), k, scale=k**-0.5) for name, (k, widths) in SHAPES.items()}
        )
        tables.append(
            {
                name: lp.AdapterTable.from_pools(
                    random(options.adapters, len(widths) * RANK, k, scale=k**-0.5),
                    random(options.adapters, sum(widths), RANK, scale=0.1),
                    slices=widths,
                )
                for name, (k, widths) in SHAPES.items()
            }
        )
    indices = torch.arange(options.tokens, dtype=torch.int32, device="cuda") % options.adapters
    mixed = lp.Routing.from_indices(indices, num_adapters=options.adapters)
    nobody = lp.Routing.from_indices(torch.full_like(indices, -1), num_adapters=options.adapters)
    h = random(options.tokens, 4096, scale=1.0)

    def ours(names: tuple[str, ...], routing: lp.Routing) -> Layer:
        def layer(x: Tensor, number: int, name: str) -> Tensor:
            weight = weights[number][name]
            if name not in names:
                return F.linear(x, weight)
            return lp.lora_linear(x, weight, tables[number][name], routing)

        return layer

    base = microseconds(ours((), mixed), h)
    print(f"{options.tokens} tokens, {options.adapters} adapters: all torch's {base:.1f}")
    for label, names in (("all", tuple(SHAPES)), *((name, (name,)) for name in SHAPES)):
        for suffix, routing in (("", mixed), (" -1", nobody)):
            took = microseconds(ours(names, routing), h)
            print(f"  {label + suffix:10s} {took:.1f}  {took - base:+.1f}  {took / base:.3f}")


if __name__ == "__main__":
    main()
