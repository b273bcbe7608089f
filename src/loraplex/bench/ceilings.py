"""What this GPU can do at best: copy bandwidth and matrix rate, measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loraplex.bench.timing import Call, time_events

COPY_BYTES = 4 * 2**30
MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Ceilings:
    """Rates of a large copy (bytes read and bytes written both count) and of a large matmul."""

    bytes_per_second: float
    flops_per_second: float

    def floor_ms(self, num_bytes: float, flops: float) -> float:
        """Milliseconds below which no implementation can be: bytes or FLOPs, whichever is longer.

        Example:
            >>> Ceilings(4e12, 800e12).floor_ms(num_bytes=4e9, flops=1e9)
            1.0
        """
        return 1e3 * max(num_bytes / self.bytes_per_second, flops / self.flops_per_second)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Copy and multiply something large on a GPU, and take the median of a few runs."""
    return Ceilings(_copy_rate(device), _matmul_rate(device, dtype))


def _copy_rate(device: torch.device) -> float:
    size = min(COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e3 * size / _median_ms(lambda: target.copy_(source))


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    # Random values: on zeros the chip runs at clocks that real data never see.
    left, right = (
        torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=dtype) for _ in range(2)
    )
    return 2e3 * MATMUL_SIZE**3 / _median_ms(lambda: left @ right)


def _median_ms(call: Call) -> float:
    return time_events([call], warmup=5, repeat=15).median
