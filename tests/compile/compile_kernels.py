"""Compile kernels for one GPU architecture on a machine without it, and report what they use.

    python tests/compile/compile_kernels.py --arch sm_90 [--catalog FILE] [--shard 0/2]

Prints one JSON object per compiled kernel: registers, bytes of local memory (spills), bytes of
shared memory and the architecture's limit. The catalog is a file with
``compile_cases(arch)``, which gives things with a ``name`` and a ``launch``. Triton caches what it
compiles (TRITON_CACHE_DIR).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

# Kernels are compiled here, so they must not become interpreted functions.
os.environ.pop("TRITON_INTERPRET", None)

SHARED_LIMITS = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}


# Bytes a kernel may put aside: the warps with the adapters keep a few addresses of their tile there
# while they do the shrink, written and read once a program, outside of the loops over K.
ALLOWED_SPILLS = {"specialized_launch_kernel": 48}


@dataclass
class Usage:
    """What one compiled kernel needs."""

    case: str
    kernel: str
    arch: str
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    shared_limit: int = 0
    wide_copies: int = 0
    narrow_loads: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def complaint(self) -> str:
        """Why this kernel fails, or an empty string."""
        found = [self.error] if self.error else []
        if self.spilled_bytes > ALLOWED_SPILLS.get(self.kernel, 0):
            found.append(
                f"spills {self.spilled_bytes} bytes per thread ({self.registers} registers)"
            )
        if self.shared_bytes > self.shared_limit:
            found.append(
                f"needs {self.shared_bytes} bytes of shared memory, {self.shared_limit} fit"
            )
        return "; ".join(found)


class CompileOnlyDriver:
    """Stands in for Triton's GPU driver: it names a target and can launch nothing."""

    def __init__(self, arch: str) -> None:
        from triton.backends.compiler import GPUTarget

        if arch.startswith("sm_"):
            self._target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
        else:
            self._target = GPUTarget("hip", arch, 64)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches(launch: Any) -> list[tuple[str, Any]]:
    """Call ``launch`` with kernel launches turned into compilations; pairs of name and kernel."""
    from triton.runtime.jit import JITFunction

    compiled = []
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.fn.__name__, kernel))
        return kernel

    JITFunction.run = run
    try:
        launch()
    finally:
        JITFunction.run = original
    return compiled


def compile_catalog(catalog: ModuleType, arch: str, shard: int, shards: int) -> Iterable[Usage]:
    """Compile this shard's cases; a case that does not compile gives a usage with an error."""
    from triton.runtime.driver import driver

    driver.set_active(CompileOnlyDriver(arch))
    cases = list(catalog.compile_cases(arch))
    for case in cases[shard::shards]:
        start = time.perf_counter()
        try:
            for name, kernel in compile_launches(case.launch):
                usage = measure(case.name, name, kernel, arch)
                usage.seconds = round(time.perf_counter() - start, 2)
                yield usage
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())[:2000]
            yield Usage(case.name, "?", arch, error=message)


def measure(case: str, name: str, kernel: Any, arch: str) -> Usage:
    """Read registers, spills and shared memory out of a compiled kernel."""
    usage = Usage(case, name, arch, shared_limit=SHARED_LIMITS[arch])
    usage.shared_bytes = int(kernel.metadata.shared)
    if "cubin" in kernel.asm:
        usage.registers, usage.spilled_bytes = cubin_usage(kernel.asm["cubin"])
        usage.wide_copies, usage.narrow_loads = load_widths(kernel.asm["ptx"])
    else:
        usage.registers, usage.spilled_bytes = amdgcn_usage(kernel.asm["amdgcn"])
    return usage


def load_widths(ptx: str) -> tuple[int, int]:
    """How many instructions copy 16 bytes past the registers, and how many load two."""
    wide = re.findall(r"cp\.async\.cg\.shared\.global [^;]*, 0x10\b", ptx)
    narrow = re.findall(r"ld\.global\S*\.[bu]16\b|cp\.async\.ca\S* [^;]*, 0x2\b", ptx)
    return len(wide), len(narrow)


def cubin_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread; our kernels have no stack but for spills."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if not found:
        raise ValueError(f"cuobjdump said nothing about resources: {text[:500]!r}")
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack + local


def amdgcn_usage(assembly: str) -> tuple[int, int]:
    """Vector registers and bytes of scratch per thread."""

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        if not found:
            raise ValueError(f"no .{name} in the assembly's metadata")
        return int(found.group(1))

    return field("vgpr_count"), max(
        field("private_segment_fixed_size"), 4 * field("vgpr_spill_count")
    )


def load_catalog(path: Path) -> ModuleType:
    """Import a file."""
    spec = importlib.util.spec_from_file_location(f"compile_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", required=True, choices=SHARED_LIMITS)
    parser.add_argument("--catalog", type=Path, default=Path(__file__).with_name("catalog.py"))
    parser.add_argument("--shard", default="0/1", help="I/N: every Nth case from the Ith on")
    args = parser.parse_args()
    shard, shards = (int(part) for part in args.shard.split("/"))
    failed = 0
    for usage in compile_catalog(load_catalog(args.catalog), args.arch, shard, shards):
        failed += bool(usage.complaint)
        print(json.dumps({**asdict(usage), "complaint": usage.complaint}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
