"""Compare repeated calls with those that go the long way, on a machine without a GPU.

    python tests/compile/repeat_calls.py

Triton compiles, binds arguments and calls its launcher as on a GPU; only the launch in C is a
function that notes what it is given. Every case is called once, so that all of them are kept; then
each is called again with other tensors, the long way and as kept, and both must launch the same
kernels with the same arguments. Prints one JSON object per case.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

# before triton is imported, which the harness sees to
import compile_kernels

os.environ["LORAPLEX_TUNING_DIR"] = ""

import catalog
import torch
import triton.backends.nvidia.driver as nvidia
from torch import Tensor
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import loraplex as lp
from loraplex.ops import kept
from loraplex.tuning.choose import _tables, choose

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
COUNTERS = torch.zeros(8192, dtype=torch.int32)
# as in Triton 3.7, where one function launches every kernel; in 3.6 each has its own
IS_ONE_LAUNCHER = hasattr(nvidia, "annotate_arguments")
launched: list[tuple[Any, ...]] = []


def note_launch(*given: Any) -> None:
    """In place of the launch in C: grid, stream, function, flags, and the kernel's arguments."""
    arguments = given[-1] if IS_ONE_LAUNCHER else given[13:]
    packed = given[7] if IS_ONE_LAUNCHER else given[9]
    launched.append((given[:7], packed, tuple(arguments)))


class Utils:
    """In place of Triton's module in C."""

    launch = staticmethod(note_launch)

    @staticmethod
    def fill_tma_descriptor(address: int, *described: Any) -> tuple[Any, ...]:
        return ("descriptor", address, *described)

    fill_tma_descriptor_tiled = fill_tma_descriptor

    @staticmethod
    def build_signature_metadata(signature: Any) -> bytes:
        return b""


def init_handles(kernel: CompiledKernel) -> None:
    """Everything that loads a kernel but the loading."""
    if kernel._run is None:
        kernel._run = nvidia.CudaLauncher(kernel.src, kernel.metadata)
        kernel.module, kernel.function = 1, id(kernel)


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """A GPU that takes launches; calls are kept as on it."""
    active = compile_kernels.CompileOnlyDriver("sm_90")
    active.utils = Utils()  # type: ignore[attr-defined]
    driver.set_active(active)
    fused = importlib.import_module("loraplex.ops.fused")
    with contextlib.ExitStack() as stack:
        stack.enter_context(catalog.pretend("sm_90"))
        changes: list[tuple[Any, str, Any]] = [
            (CompiledKernel, "_init_handles", init_handles),
            (fused, "counters_of", lambda device, count: COUNTERS),
            (kept, "counters_of", lambda device, count: COUNTERS),
            (kept, "is_on_current_gpu", lambda x: True),
            (kept, "current_stream", lambda device: 0),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
        ]
        if IS_ONE_LAUNCHER:
            changes.append((nvidia, "annotate_arguments", lambda signature: []))
        else:
            module = types.SimpleNamespace(launch=note_launch)
            changes += [
                (nvidia, "make_launcher", lambda *given: ""),
                (nvidia, "compile_module_from_src", lambda **given: module),
                (nvidia, "library_dirs", list),
            ]
        for owner, name, stand_in in changes:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


@dataclass(frozen=True)
class Case:
    """One call; ``x`` and ``weight`` may be dense, wide (longer rows), or off by some elements."""

    name: str
    m: int = 64
    k: int = 512
    slices: tuple[int, ...] = (256,)
    num_adapters: int = 8
    rank: int = 16
    dtype: str = "bfloat16"
    x: str = "dense"
    weight: str = "dense"
    has_bias: bool = False
    has_column_scale: bool = False
    has_adapter_bias: bool = False
    max_tokens: int = 0
    impl: str = "fused"
    is_kept: bool = True


PLAIN = Case("plain")
CASES = (
    PLAIN,
    *(replace(PLAIN, name=f"M={m}", m=m) for m in (1, 2, 15, 16, 17, 48, 65)),
    replace(PLAIN, name="room for more tokens", m=17, max_tokens=128),
    replace(PLAIN, name="K", k=1024),
    replace(PLAIN, name="K of no 16 bytes", k=511),
    replace(PLAIN, name="N", slices=(512,)),
    replace(PLAIN, name="slices", slices=(128, 128)),
    replace(PLAIN, name="slices the other way", slices=(192, 64)),
    replace(PLAIN, name="one adapter", num_adapters=1),
    replace(PLAIN, name="16 adapters", num_adapters=16),
    replace(PLAIN, name="rank 8", rank=8),
    replace(PLAIN, name="rank 5", rank=5),
    replace(PLAIN, name="rank 64", rank=64),
    replace(PLAIN, name="float16", dtype="float16"),
    replace(PLAIN, name="float32", dtype="float32"),
    replace(PLAIN, name="wide x", x="wide"),
    replace(PLAIN, name="wider x", x="wider"),
    replace(PLAIN, name="wide weight", weight="wide"),
    replace(PLAIN, name="x off by 16 bytes", x="off 8"),
    replace(PLAIN, name="x off by 2 bytes", x="off 1", is_kept=False),
    replace(PLAIN, name="weight off by 8 bytes", weight="off 4", is_kept=False),
    replace(PLAIN, name="bias", has_bias=True),
    replace(PLAIN, name="column scale", has_column_scale=True),
    replace(PLAIN, name="adapter bias", has_adapter_bias=True),
    replace(PLAIN, name="any impl", impl="triton"),
    replace(PLAIN, name="two passes", impl="gemm_add", is_kept=False),
)
ROLES = ("x", "weight", "entries", "indices", "places", "plan", "bias", "y")


def lay_out(rows: int, columns: int, dtype: torch.dtype, layout: str) -> Tensor:
    """A matrix in memory that nothing touches; rows stay multiples of 16 bytes where they were."""
    if layout.startswith("off"):
        first = int(layout.split()[1])
        return torch.empty(rows, columns + 16, dtype=dtype)[:, first : first + columns]
    more = {"dense": 0, "wide": 16, "wider": 24}[layout]
    return torch.empty(rows, columns + more, dtype=dtype)[:, :columns]


def tensors_of(case: Case) -> dict[str, Any]:
    """Fresh tensors, table and routing of a case."""
    dtype, n, count = DTYPES[case.dtype], sum(case.slices), case.num_adapters
    table = lp.AdapterTable.from_pools(
        torch.empty(count, len(case.slices) * case.rank, case.k, dtype=dtype),
        torch.empty(count, n, case.rank, dtype=dtype),
        case.slices,
        column_scale=torch.ones(count, n) if case.has_column_scale else None,
        bias=torch.ones(count, n) if case.has_adapter_bias else None,
    )
    most = case.max_tokens or case.m
    routing = lp.Routing.allocate(most, num_adapters=count, device="cpu")
    routing.update_([0] * case.m)
    return {
        "x": lay_out(case.m, case.k, dtype, case.x),
        "weight": lay_out(n, case.k, dtype, case.weight),
        "bias": torch.empty(n, dtype=dtype) if case.has_bias else None,
        "table": table,
        "routing": routing,
        "entries": table.entries,
        "indices": routing.indices,
        "places": routing.places,
        "plan": routing.plan,
    }


def call(case: Case, given: Mapping[str, Any]) -> tuple[Tensor, list[tuple[Any, ...]], int]:
    """The result, what was launched, and how many launches Triton was asked for."""
    launched.clear()
    original, asked = JITFunction.run, []

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(self)
        return original(self, *args, **kwargs)

    with mock.patch.object(JITFunction, "run", run):
        y = lp.lora_linear(
            given["x"], given["weight"], given["table"], given["routing"], given["bias"],
            impl=case.impl,
        )  # fmt: skip
    return y, list(launched), len(asked)


class Naming:
    """Names for addresses, so that launches with different tensors can be compared."""

    def __init__(self, given: Mapping[str, Any], y: Tensor) -> None:
        self.named = {
            tensor.data_ptr(): role
            for role, tensor in {**given, "y": y}.items()
            if role in ROLES and tensor is not None
        }
        self.named[COUNTERS.data_ptr()] = "counters"
        self.rooms: dict[int, str] = {}
        self.sizes: dict[str, int] = {}

    def name(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.numel() == 0:
                return "nothing"
            name = self._of(value.data_ptr())
            self.sizes[name] = value.nbytes
            return name
        if isinstance(value, tuple) and value[:1] == ("descriptor",):
            return ("descriptor", self._of(value[1]), *value[2:])
        if type(value) is int and value > 1 << 32:
            return self._of(value)
        return value

    def _of(self, address: int) -> str:
        if address in self.named:
            return self.named[address]
        return self.rooms.setdefault(address, f"room {len(self.rooms)}")


def why_different(
    long: Sequence[tuple[Any, ...]], short: Sequence[tuple[Any, ...]], names: Naming, others: Naming
) -> str:
    """What a repeated call launched otherwise than the long way; empty if nothing."""
    if len(long) != len(short):
        return f"{len(short)} launches instead of {len(long)}"
    for (flags, packed, wanted), (own_flags, own_packed, given) in zip(long, short, strict=True):
        if (flags, packed) != (own_flags, own_packed):
            return f"launched {own_flags} {own_packed} instead of {flags} {packed}"
        if len(wanted) != len(given):
            return f"{len(given)} arguments instead of {len(wanted)}"
        for number, pair in enumerate(zip(wanted, given, strict=True)):
            want, have = names.name(pair[0]), others.name(pair[1])
            if want != have and want != "nothing":
                return f"argument {number} is {have!r} instead of {want!r}"
            if type(want) is not type(have):
                return f"argument {number} is a {type(have).__name__}"
    ends = [(address, names.sizes[name]) for address, name in sorted(others.rooms.items())]
    for (address, size), (following, _) in pairwise(ends):
        if address + size > following:
            return "two pieces of room share memory"
    return ""


def compare(case: Case) -> str:
    """Call a case whose like is kept the long way and the short one."""
    given, others = tensors_of(case), tensors_of(case)
    with kept.nothing_kept():
        y, long, _ = call(case, given)
    if not long:
        return "nothing was launched"
    own_y, short, asked = call(case, others)
    if asked != (0 if case.is_kept else len(long)):
        return f"Triton was asked for {asked} of {len(long)} launches"
    if y.shape != own_y.shape or y.dtype != own_y.dtype:
        return f"the result is {own_y.dtype} {tuple(own_y.shape)}"
    return why_different(long, short, Naming(given, y), Naming(others, own_y))


@contextlib.contextmanager
def rules(folder: str, configs: Mapping[str, Any] | None) -> Iterator[None]:
    """The shipped tables, or these blocks for every call."""
    table = {"lora_linear": [{"impl": "fused", **configs}]} if configs else {}
    (Path(folder) / "sm_90.json").write_text(json.dumps(table))
    for cached in (_tables, choose):
        cached.cache_clear()
    yield


def main() -> int:
    is_bad = False
    aligned = {"is_vectorizable": True, "dtype": ["float16", "bfloat16"]}
    ways = {
        "shipped": None,
        "specialized": {**catalog.SPECIALIZED, "when": aligned},
        "single": {**catalog.SINGLE_LAUNCH, "when": {"max_m": 64}},
    }
    with tempfile.TemporaryDirectory() as folder, pretending(), torch.no_grad():
        os.environ["LORAPLEX_TUNING_DIR"] = folder
        for way, configs in ways.items():
            with rules(folder, configs):
                for case in CASES:
                    call(case, tensors_of(case))
                for case in CASES:
                    complaint = compare(case)
                    is_bad |= bool(complaint)
                    told = {"way": way, "case": case.name, "complaint": complaint}
                    print(json.dumps(told), flush=True)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
