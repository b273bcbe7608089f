"""What the compile test compiles: public ops, called as users call them, on tensors of real sizes.

Tensors lie in host memory that nothing touches. Inside :func:`pretend` the ops believe that they
run on the architecture in question, so that the tuning tables choose as they would there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from itertools import product
from typing import Any
from unittest import mock

import torch

import loraplex as lp
import loraplex.ops
from loraplex import tuning
from loraplex.ops.impls import TRITON_IMPLS
from loraplex.tuning import Choice, choose

# Only a measured table sends anything to the single launch; these blocks fit everywhere.
SINGLE_LAUNCH = {
    "shrink": {
        "block_r": 16, "block_k": 32, "lanes": 4, "split_k": 2, "num_warps": 4, "num_stages": 3,
    },
    "linear": {
        "block_m": 16, "block_n": 64, "block_k": 64, "block_r": 32, "split_k": 1,
        "is_swapped": 1, "has_descriptor": 0, "group_m": 8, "lora_stages": 2, "num_warps": 4,
        "num_stages": 3, "is_single_launch": 1, "has_lora_part": 0, "expand_at": 8,
        "lora_steps": 0, "prefetch": 128, "is_early": 0,
    },
}  # fmt: skip
SINGLE_LAUNCH_WAYS: tuple[dict[str, int], ...] = (
    {},
    {"expand_at": 4, "split_k": 3, "lora_steps": 4, "is_early": 1},
    {"has_lora_part": 1, "split_k": 2},
)
HAS_COPY_ENGINE = ("sm_90", "sm_100")
# Of the launch with warps for the adapters every number of warps and programs a multiprocessor.
SPECIALIZED = {
    "shrink": {"block_r": 16, "block_k": 32, "split_k": 4},
    "linear": {
        "is_specialized": 1, "block_m": 64, "block_n": 64, "block_k": 128, "block_r": 64,
        "split_k": 2, "lora_stages": 2, "occupancy": 1, "num_warps": 4, "num_stages": 4,
    },
}  # fmt: skip
SPECIALIZED_WAYS: tuple[dict[str, int], ...] = (
    {},
    {"block_k": 64, "num_stages": 5, "occupancy": 2, "lora_stages": 1},
    {
        "block_n": 128,
        "block_k": 64,
        "num_stages": 3,
        "split_k": 1,
        "occupancy": 2,
        "lora_stages": 1,
    },
    {"block_n": 256, "block_k": 64, "split_k": 1, "num_warps": 8, "lora_stages": 1},
)
# So it is with the shrink that takes all slices at once.
WIDE = {
    "shrink": {
        "is_wide": 1, "block_r": 64, "block_k": 64, "lanes": 1, "split_k": 1, "num_warps": 4,
        "num_stages": 2,
    },
    "expand": {
        "block_m": 64, "block_n": 64, "block_r": 32, "lora_stages": 2, "num_warps": 4,
        "num_stages": 2,
    },
}  # fmt: skip

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class CompileCase:
    """One call to compile; everything that it launches is compiled and checked."""

    name: str
    launch: Callable[[], object]


@dataclass(frozen=True)
class Problem:
    """One op on one layer; ``is_aligned`` false makes rows start anywhere (odd K)."""

    op: str
    impl: str
    m: int = 64
    k: int = 4096
    slices: tuple[int, ...] = (4096, 1024, 1024)
    num_adapters: int = 8
    rank: int = 16
    dtype: str = "bfloat16"
    is_aligned: bool = True
    has_extras: bool = False
    is_fused: bool = False

    def __str__(self) -> str:
        widths = "+".join(str(width) for width in self.slices)
        flags = ("" if self.is_aligned else " odd") + (" dora" if self.has_extras else "")
        flags += " expand" if self.is_fused else ""
        return (
            f"{self.op}/{self.impl} {self.dtype} M={self.m} {self.k}>{widths} "
            f"L={self.num_adapters} r={self.rank}{flags}"
        )


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Every rule that the tables have for this architecture, and what rules do not tell apart."""
    problems = [*rule_problems(arch), *filter(lambda p: reason_of(p, arch), other_problems())]
    for problem in dict.fromkeys(problems):
        yield CompileCase(str(problem), lambda problem=problem: call(problem, arch))
    yield from single_launch_cases(arch)
    yield from wide_shrink_cases(arch)
    if arch == "sm_90":
        yield from specialized_cases(arch)
    for max_tokens, dtype in ((1, torch.int32), (64, torch.int64), (4096, torch.int32)):
        yield CompileCase(
            f"routing M={max_tokens} {dtype}",
            lambda max_tokens=max_tokens, dtype=dtype: call_routing(max_tokens, dtype),
        )


def single_launch_cases(arch: str) -> Iterator[CompileCase]:
    """The kernel that waits for itself, also where no shipped rule takes it."""
    plain = Problem("lora_linear", "fused", m=16)
    for problem, changes in (
        *((plain, way) for way in SINGLE_LAUNCH_WAYS),
        (replace(plain, m=40, has_extras=True), {"is_swapped": 0}),
        (replace(plain, dtype="float32"), {"has_lora_part": 1}),
        # masked loads of two bytes need many registers
        (
            replace(plain, k=4095, slices=(3423,), is_aligned=False),
            {"split_k": 2, "block_n": 32, "block_k": 32},
        ),
    ):
        has_engine = arch in HAS_COPY_ENGINE and problem.is_aligned and problem.dtype != "float32"
        for has_descriptor in (0, 1) if has_engine else (0,):
            config = {**changes, "has_descriptor": has_descriptor}
            words = " ".join(f"{key}={value}" for key, value in config.items())
            yield CompileCase(
                f"single launch {words} {problem}",
                lambda problem=problem, config=config: call_single(problem, arch, config),
            )


def specialized_cases(arch: str) -> Iterator[CompileCase]:
    """The launch with warps for the adapters, read early or not, also where no rule takes it."""
    plain = Problem("lora_linear", "fused")
    for problem, changes in (
        *((plain, way) for way in SPECIALIZED_WAYS),
        (replace(plain, m=1, rank=8), {"block_m": 16, "block_r": 16, "num_stages": 6}),
        (replace(plain, m=16, rank=64), {"block_m": 16}),
        (replace(plain, num_adapters=64, dtype="float16"), {}),
        (replace(plain, k=4088, slices=(3420, 100), has_extras=True), {"split_k": 3}),
        (replace(plain, m=100, num_adapters=128), {}),
    ):
        for is_settled in (False, True):
            configs = {**SPECIALIZED, "linear": {**SPECIALIZED["linear"], **changes}}
            words = " ".join(f"{key}={value}" for key, value in changes.items())
            yield CompileCase(
                f"specialized {words} {'settled ' * is_settled}{problem}",
                partial(call_specialized, problem, arch, configs, is_settled),
            )


def wide_shrink_cases(arch: str) -> Iterator[CompileCase]:
    """The shrink that takes all slices at once, also where no shipped rule takes it."""
    plain = Problem("lora_linear", "gemm_add", m=4096)
    for problem, changes in (
        (plain, {}),
        (replace(plain, m=40), {"split_k": 2}),
        (replace(plain, rank=64, dtype="float16"), {"block_r": 128, "num_warps": 8, "split_k": 4}),
        (replace(plain, dtype="float32"), {"block_r": 16, "block_k": 32}),
        (
            replace(plain, k=4095, slices=(3423,), is_aligned=False),
            {"split_k": 2, "block_k": 32},
        ),
    ):
        configs = {**WIDE, "shrink": {**WIDE["shrink"], **changes}}
        words = " ".join(f"{key}={value}" for key, value in changes.items())
        yield CompileCase(
            f"wide shrink {words} {problem}",
            partial(call_with, problem, arch, configs),
        )


def rule_problems(arch: str) -> Iterator[Problem]:
    """A problem for each tuning rule, at the largest M that the rule takes."""
    tables = resources.files("loraplex.tuning").joinpath("tables")
    for name in (f"{arch}.json", "default.json"):
        path = tables.joinpath(name)
        if path.is_file():
            for op, rules in json.loads(path.read_text()).items():
                if op in TRITON_IMPLS:
                    for number, rule in enumerate(rules):
                        if rule["impl"] in TRITON_IMPLS[op]:
                            reason = f"rule {number} of {op} in {name}"
                            yield rule_problem(op, rule["impl"], rule.get("when", {}), arch, reason)


def rule_problem(op: str, impl: str, when: Mapping[str, Any], arch: str, reason: str) -> Problem:
    """A problem within a rule's conditions, and outside those of the rules before it."""
    width = when.get("n") or when.get("min_n") or when.get("max_n") or 4096
    plain = Problem(
        op,
        impl,
        m=when.get("max_m") or max(when.get("min_m", 0), 4096),
        k=when.get("k") or when.get("max_k") or max(when.get("min_k", 0), 4096),
        slices=tuple(when.get("slices", (width,))),
        num_adapters=min(8, when.get("max_adapters", 8)),
        rank=min(16, when.get("max_rank", 16)),
        dtype=when.get("dtype", ["bfloat16"])[0],
        is_aligned=when.get("is_vectorizable", True),
    )
    larger = (
        replace(plain, num_adapters=size, rank=rank, slices=slices, k=k)
        for size, rank, slices, k in product(
            (plain.num_adapters, 64), (plain.rank, 128), (plain.slices, (28672,)), (plain.k, 14336)
        )
    )
    # a rule that nothing reaches on this architecture is one of the default table
    return next((problem for problem in larger if reason_of(problem, arch) == reason), plain)


def other_problems() -> Iterator[Problem]:
    """Layouts, ranks and extras that reach other branches of the same kernels."""
    for op, impls in TRITON_IMPLS.items():
        for impl in impls:
            plain = Problem(op, impl)
            yield plain
            yield replace(plain, m=1)
            yield replace(plain, dtype="float16")
            yield replace(plain, dtype="float32")
            yield replace(plain, k=4095, slices=(3423,), is_aligned=False)
            if op == "matmul":
                yield replace(plain, is_fused=True)
                yield replace(plain, m=4096, is_fused=True)
                continue
            yield replace(plain, rank=256, num_adapters=64)
            yield replace(plain, m=256, num_adapters=64)
            if op in ("lora_linear", "add_lora"):
                yield replace(plain, has_extras=True)


def reason_of(problem: Problem, arch: str) -> str:
    """Which rule takes a problem, empty for none; named implementations may refuse some."""
    try:
        return choose(
            tuning.Problem(
                problem.op, problem.m, problem.k, problem.slices, problem.num_adapters,
                problem.rank, problem.dtype, arch, problem.is_aligned,
            ),
            problem.impl,
        ).reason  # fmt: skip
    except lp.LoraplexError:
        return ""


def call(problem: Problem, arch: str) -> None:
    """Call the public function as a user would."""
    with pretend(arch):
        dtype = DTYPES[problem.dtype]
        n, size = sum(problem.slices), problem.num_adapters
        x = torch.empty(problem.m, problem.k, dtype=dtype)
        weight = torch.empty(n, problem.k, dtype=dtype)
        if problem.op == "matmul":
            if problem.is_fused:
                y, b = torch.empty(problem.m, 16, dtype=dtype), torch.empty(16, n, dtype=dtype)
                lp.fused_matmul_expand(x, weight.T, y, b, impl=problem.impl)
            else:
                lp.matmul(x, weight.T, impl=problem.impl)
            return
        a_pool = torch.empty(size, len(problem.slices) * problem.rank, problem.k, dtype=dtype)
        b_pool = torch.empty(size, n, problem.rank, dtype=dtype)
        indices = torch.zeros(problem.m, dtype=torch.int32)
        if problem.op == "multi_lora":
            lp.multi_lora(x, a_pool, b_pool, indices, slices=problem.slices, impl=problem.impl)
            return
        extra = torch.ones(size, n) if problem.has_extras else None
        table = lp.AdapterTable.from_pools(
            a_pool, b_pool, problem.slices, column_scale=extra, bias=extra
        )
        routing = lp.Routing.from_indices(indices, num_adapters=size)
        bias = torch.empty(n, dtype=dtype) if problem.has_extras else None
        if problem.op == "add_lora":
            y = torch.empty(problem.m, n, dtype=dtype)
            lp.add_lora_(y, x, table, routing, bias=bias, impl=problem.impl)
        else:
            lp.lora_linear(x, weight, table, routing, bias=bias, impl=problem.impl)


def call_single(problem: Problem, arch: str, changes: Mapping[str, int]) -> None:
    """``lora_linear`` in one launch, whatever the tables say."""
    linear = {**SINGLE_LAUNCH["linear"], **changes}
    call_with(problem, arch, {**SINGLE_LAUNCH, "linear": linear})


def call_specialized(
    problem: Problem, arch: str, configs: Mapping[str, Mapping[str, int]], is_settled: bool
) -> None:
    """``lora_linear`` in a launch that may read its operands early, or not."""
    with mock.patch("loraplex.ops.fused.are_settled", return_value=is_settled):
        call_with(problem, arch, configs)


def call_with(problem: Problem, arch: str, configs: Mapping[str, Mapping[str, int]]) -> None:
    """``lora_linear`` with these blocks, whatever the tables say."""
    chosen = Choice(problem.impl, configs, "the compile test")
    # the package has a function of the module's name
    module = importlib.import_module("loraplex.ops.lora_linear")
    with mock.patch.object(module, "resolve", return_value=chosen):
        call(problem, arch)


@contextlib.contextmanager
def pretend(arch: str) -> Iterator[None]:
    """Let the ops take host tensors for tensors of a GPU of this architecture."""
    with contextlib.ExitStack() as stack:
        for found in pkgutil.iter_modules(loraplex.ops.__path__):
            module = importlib.import_module(f"loraplex.ops.{found.name}")
            for name, stand_in in (
                ("arch_of", lambda device: arch),
                ("why_no_triton", lambda device, dtype: ""),
            ):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, stand_in))
        # A torch without CUDA cannot tell.
        stack.enter_context(
            mock.patch("torch.cuda.is_current_stream_capturing", return_value=False)
        )
        # The base GEMM of some implementations is torch's: nothing to compile, and slow here.
        stack.enter_context(
            mock.patch(
                "torch.nn.functional.linear",
                lambda x, w, b=None: x.new_empty(x.shape[0], w.shape[0]),
            )
        )
        yield


def call_routing(max_tokens: int, dtype: torch.dtype) -> None:
    """Launch the kernel that builds a routing on the device."""
    routing = lp.Routing.allocate(max_tokens, num_adapters=8, device="cpu")
    routing.device = torch.device("cuda")  # which side builds it; its tensors stay where they are
    routing._build(torch.zeros(max_tokens, dtype=dtype))
