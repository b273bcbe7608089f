"""Every kernel that some number of tokens launches is launched at one of the sizes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import loraplex as lp
import loraplex.kernels
import loraplex.ops
from loraplex import env
from loraplex.ops.impls import arch_of
from loraplex.ops.sizes import sizes_to_compile
from loraplex.testing import tuning_table

MOST = 2100
MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Case:
    """One layer."""

    name: str
    op: str = "lora_linear"
    arch: str = "sm_90"
    k: int = 256
    slices: tuple[int, ...] = (256,)
    slots: int = 8
    rank: int = 16
    dtype: torch.dtype = torch.bfloat16
    impl: str = "triton"


PLAIN = Case("plain")
CASES = (
    PLAIN,
    replace(PLAIN, name="qkv with halves", k=512, slices=(4096, 1024, 1024)),
    replace(PLAIN, name="long rows", k=9216),
    replace(PLAIN, name="wide", slices=(4608, 4608), slots=64),
    replace(PLAIN, name="rank 8", rank=8, slices=(128, 8, 8)),
    replace(PLAIN, name="rank 64", rank=64, dtype=torch.float16),
    replace(PLAIN, name="rank 5", rank=5, k=255),
    replace(PLAIN, name="one slot", slots=1),
    replace(PLAIN, name="sm_80", arch="sm_80"),
    replace(PLAIN, name="float32", arch="sm_80", dtype=torch.float32),
    replace(PLAIN, name="two passes", impl="gemm_add"),
    replace(PLAIN, name="added", op="add_lora"),
    replace(PLAIN, name="added, rank 64, sm_80", op="add_lora", rank=64, arch="sm_80"),
)


class Launches:
    """What Triton would compile for the launches of a call, which are not made."""

    def __init__(self) -> None:
        self.compiled: set[object] = set()

    def note(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        left_out = unspecialised(kernel)
        given = zip(kernel.arg_names, args, strict=False)
        described = [describe(value, name in left_out) for name, value in given]
        self.compiled.add((kernel.fn.__name__, *described, *sorted(constants.items())))


def unspecialised(kernel: Any) -> set[str]:
    """Names of the arguments whose value a kernel is not compiled for."""
    if hasattr(kernel, "params"):
        names = {param.name for param in kernel.params if param.do_not_specialize}
    else:
        names = set(kernel.kwargs["do_not_specialize"] or ())
    return names


def describe(value: Any, is_left_out: bool) -> object:
    """What of an argument becomes part of a compiled kernel, as Triton has it."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if hasattr(value, "block_shape"):
        return value.base.dtype, tuple(value.block_shape)
    assert isinstance(value, int)
    return "int" if is_left_out else (value == 1, value % 16 == 0)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Launches]:
    """The ops believe in a GPU of an architecture; launches are noted."""
    launches = Launches()

    def pretend(arch: str) -> Launches:
        stand_ins: dict[str, Any] = {
            "arch_of": lambda device: arch,
            "why_no_triton": lambda device, dtype: "",
            "count_multiprocessors": lambda device: MULTIPROCESSORS,
        }
        for found in pkgutil.iter_modules(loraplex.ops.__path__):
            module = importlib.import_module(f"loraplex.ops.{found.name}")
            for name in stand_ins.keys() & vars(module).keys():
                monkeypatch.setattr(module, name, stand_ins[name])
        for found in pkgutil.iter_modules(loraplex.kernels.__path__):
            module = importlib.import_module(f"loraplex.kernels.{found.name}")
            if found.name != "launch" and "launch" in vars(module):
                monkeypatch.setattr(module, "launch", launches.note)
        monkeypatch.setattr(env, "is_interpreting", lambda: False)
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(
            torch.nn.functional, "linear", lambda x, w, b=None: x.new_empty(len(x), len(w))
        )
        return launches

    return pretend


def run(case: Case, table: lp.AdapterTable, weight: torch.Tensor, m: int) -> None:
    x = torch.empty(m, case.k, dtype=case.dtype)
    routing = lp.Routing(m, case.slots, torch.device("cpu"))
    if case.op == "lora_linear":
        lp.lora_linear(x, weight, table, routing, impl=case.impl)
    else:
        y = torch.empty(m, sum(case.slices), dtype=case.dtype)
        lp.add_lora_(y, x, table, routing, impl=case.impl)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sizes_launch_everything(case: Case, pretended: Any) -> None:
    launches = pretended(case.arch)
    n = sum(case.slices)
    table = lp.AdapterTable.from_pools(
        torch.empty(case.slots, len(case.slices) * case.rank, case.k, dtype=case.dtype),
        torch.empty(case.slots, n, case.rank, dtype=case.dtype),
        case.slices,
    )
    weight = torch.empty(n, case.k, dtype=case.dtype)
    x = torch.empty(1, case.k, dtype=case.dtype)
    given = weight if case.op == "lora_linear" else None
    sizes = sizes_to_compile(case.op, x, table, MOST, given, case.impl)
    assert len(sizes) < 16
    for m in sizes:
        run(case, table, weight, m)
    few = set(launches.compiled)
    for m in range(1, MOST + 1):
        run(case, table, weight, m)
    assert launches.compiled == few


def test_a_rule_without_blocks_takes_those_of_add_lora(device: torch.device) -> None:
    rules = {
        "lora_linear": [{"impl": "gemm_add"}],
        "add_lora": [
            {"impl": "shrink_expand", "when": {"min_m": 70, "max_m": 90}, "expand": {"block_n": 32}}
        ],
    }
    table = lp.AdapterTable.from_pools(
        torch.zeros(3, 8, 64, device=device), torch.zeros(3, 32, 8, device=device)
    )
    x, weight = torch.zeros(1, 64, device=device), torch.zeros(32, 64, device=device)
    with tuning_table(rules):
        sizes = sizes_to_compile("lora_linear", x, table, 100, weight, impl="gemm_add")
    assert sizes == [16, 32, 64, 90, 100], arch_of(device)
