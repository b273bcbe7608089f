"""Host time of eager calls on a GPU: lora_linear, the long way of it, and F.linear at 4096 x 4096.

python benchmarks/host_time.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

import loraplex as lp
from loraplex.ops.kept import nothing_kept

SIZE, ADAPTERS, RANK = 4096, 8, 16
GROUP, CALLS = 20, 2000


def host_time(call: Callable[[], object]) -> tuple[float, float]:
    """Mean and least microseconds a call, in groups so small that the launch queue never fills."""
    for _ in range(50):
        call()
    times = []
    for _ in range(CALLS // GROUP):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(GROUP):
            call()
        times.append((time.perf_counter() - start) / GROUP * 1e6)
    torch.cuda.synchronize()
    return sum(times) / len(times), min(times)


def show(what: str, call: Callable[[], object]) -> None:
    mean, best = host_time(call)
    print(f"{what:50s} mean {mean:6.1f} best {best:6.1f} us", flush=True)


def main() -> None:
    print(torch.__version__, torch.cuda.get_device_name())
    for dtype in (torch.bfloat16, torch.float16):
        options: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
        weight = torch.randn(SIZE, SIZE, **options)
        table = lp.AdapterTable.from_pools(
            torch.randn(ADAPTERS, RANK, SIZE, **options),
            torch.randn(ADAPTERS, SIZE, RANK, **options),
        )
        for rows in (1, 64):
            x = torch.randn(rows, SIZE, **options)
            slots = [row % ADAPTERS for row in range(rows)]
            routing = lp.Routing.from_indices(slots, num_adapters=ADAPTERS, device="cuda")

            call = partial(lp.lora_linear, x, weight, table, routing)
            for around in (torch.no_grad, torch.inference_mode):
                with around():
                    what = f"{str(dtype)[6:]} M={rows} {around.__name__}"
                    show(f"{what} F.linear", partial(F.linear, x, weight))
                    show(f"{what} lora_linear", call)
            with torch.no_grad(), nothing_kept():
                show(f"{str(dtype)[6:]} M={rows} no_grad the long way", call)


if __name__ == "__main__":
    main()
