"""``loraplex check``: is every implementation right on this machine?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import loraplex as lp
from loraplex import env
from loraplex.bench.cases import (
    Case,
    Inputs,
    compute,
    expect,
    four_tokens,
    make_inputs,
    random_cases,
    rounding_slack,
)
from loraplex.bench.header import make_header
from loraplex.bench.timing import capture
from loraplex.bench.verdict import judge
from loraplex.cli.arguments import check_file, whole
from loraplex.cli.bench import write_json
from loraplex.cli.render import Column, print_table, progress
from loraplex.ops.impls import TRITON_IMPLS, why_no_triton

FOUR_TOKEN_TOLERANCE = 1e-3
# The op in TRITON_IMPLS that decides which implementations a checked op has.
FAMILY = {"fused_matmul_expand": "matmul"}
INTERPRETED_CASES = 60
MOST_CASES = 1_000_000


@dataclass
class Group:
    """Results of one op with one implementation in one dtype."""

    op: str
    impl: str
    dtype: str
    cases: int = 0
    refused: int = 0
    failed: int = 0
    worst: float = 0.0
    note: str = ""
    failures: list[str] = field(default_factory=list)

    def add(self, case: Case, share: float, complaint: str) -> None:
        """Count one case; ``share`` is its error as part of what is allowed."""
        self.cases += 1
        self.worst = max(self.worst, share)
        if complaint:
            self.failed += 1
            self.failures.append(f"{case}: {complaint}")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``check``."""
    parser = subparsers.add_parser(
        "check",
        help="verify the results of every implementation on this machine",
        description="Run the four-token example and random cases through every implementation "
        "that this machine has, and compare with float64. Exit code 1 on any failure.",
    )
    parser.add_argument(
        "--cases", type=whole(0, MOST_CASES), default=400, help="random cases (default 400)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random cases (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")


def run(args: argparse.Namespace) -> int:
    """Check, print a table, and return 1 if anything failed."""
    check_file("--json", args.json)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    interpreted = 0
    if not has_gpu:
        env.use_interpreter()
        torch.set_num_threads(1)
        interpreted = min(args.cases, INTERPRETED_CASES)
        print(
            "No GPU here: the torch implementation runs all cases; Triton kernels run in the "
            f"interpreter, on {interpreted} small cases in float32 and float16.\n"
        )
    groups: dict[tuple[str, str, str], Group] = {}
    jobs = list(plan(args.cases, interpreted, args.seed, has_gpu=has_gpu))
    with progress(len(jobs)) as bar:
        for case, impls in jobs:
            bar.start(str(case))
            check_case(case, impls, device, groups)
            bar.advance()
    if has_gpu:
        for impl in TRITON_IMPLS["lora_linear"]:
            check_replay(impl, device, groups)
    return report(list(groups.values()), args.json)


def plan(
    count: int, interpreted: int, seed: int, *, has_gpu: bool
) -> Iterator[tuple[Case, tuple[str, ...]]]:
    """Every case with the implementations that it goes through."""
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    yield four_tokens(), ("torch", "auto", *TRITON_IMPLS["multi_lora"])
    for case in random_cases(count, dtypes, is_small=False, seed=seed):
        triton = TRITON_IMPLS[FAMILY.get(case.op, case.op)] if has_gpu else ()
        yield case, ("torch", "auto", *triton) if has_gpu else ("torch",)
    for case in random_cases(interpreted, dtypes[:2], is_small=True, seed=seed):
        yield case, TRITON_IMPLS[FAMILY.get(case.op, case.op)]


def check_case(
    case: Case,
    impls: Sequence[str],
    device: torch.device,
    groups: dict[tuple[str, str, str], Group],
) -> None:
    """Run one case through its implementations and put what came out into the groups."""
    inputs = make_inputs(case, device)
    base, delta = expect(case, inputs, torch.float64)
    eager = sum(expect(case, inputs, case.dtype))
    assert isinstance(eager, torch.Tensor)
    slack = rounding_slack(case, base, delta)
    is_example = case.mix == four_tokens().mix
    dtype = str(case.dtype).removeprefix("torch.")
    for impl in impls:
        key = (f"{case.op}, four tokens" if is_example else case.op, impl, dtype)
        group = groups.setdefault(key, Group(*key))
        reason = why_no_triton(device, dtype) if impl not in ("torch", "auto") else ""
        if reason:
            group.note = reason
            continue
        try:
            result = compute(case, inputs, impl)
        except lp.LoraplexError as error:
            # Saying no is an answer for one implementation, not for what "auto" chooses.
            group.refused += 1
            if impl in ("torch", "auto"):
                group.add(case, 0.0, f"refused: {error}")
            continue
        except Exception as error:
            group.add(case, 0.0, f"{type(error).__name__}: {error}")
            continue
        verdict = judge(result, eager, base + delta, slack=slack)
        if is_example:
            is_right = verdict.max_error <= FOUR_TOKEN_TOLERANCE
            share = verdict.max_error / FOUR_TOKEN_TOLERANCE
        else:
            is_right, share = verdict.is_correct, verdict.max_error / verdict.bound
        complaint = "" if is_right else str(verdict)
        group.add(case, share, complaint or complain_of_base_rows(case, inputs, result, impl))


def check_replay(
    impl: str, device: torch.device, groups: dict[tuple[str, str, str], Group]
) -> None:
    """A CUDA graph captured with one routing must follow what the routing says later."""
    ranks, f16, i32 = (8, 16, 0, 48), torch.float16, torch.int32
    case = Case("lora_linear", 33, 256, (128, 64), ranks, "uniform", 0.3, f16, i32, 1)
    key = ("lora_linear, graph replay", impl, "float16")
    group = groups.setdefault(key, Group(*key))
    inputs = make_inputs(case, device)
    table = lp.AdapterTable.from_pools(
        inputs.a_pool, inputs.b_pool, case.slices, inputs.scaling, torch.tensor(ranks)
    )
    routing = lp.Routing.allocate(case.m, num_adapters=len(ranks), device=device)

    def call() -> torch.Tensor:
        return lp.lora_linear(inputs.x, inputs.weight, table, routing, impl=impl)

    graph, _ = capture([call])
    del graph  # compiles and warms up; the graph below keeps its output
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    for indices in (inputs.indices, inputs.indices.flip(0), torch.full_like(inputs.indices, -1)):
        routing.update_(indices)
        wanted = call()
        result.fill_(torch.nan)
        graph.replay()
        is_same = torch.equal(result, wanted)
        group.add(case, 0.0, "" if is_same else "a replayed graph differs from the call itself")


def complain_of_base_rows(case: Case, inputs: Inputs, result: torch.Tensor, impl: str) -> str:
    """Rows of index -1 must have the bits that the same path gives when no row has an adapter."""
    if case.op in FAMILY or case.op == "matmul":
        return ""
    rows = (inputs.indices < 0).nonzero()[:, 0]
    if rows.numel() == 0:
        return ""
    base_only = replace(inputs, indices=torch.full_like(inputs.indices, -1))
    wanted = compute(case, base_only, impl)[rows]
    if torch.equal(result[rows], wanted):
        return ""
    return "rows of index -1 differ from the base result"


def report(groups: Sequence[Group], json_path: Path | None) -> int:
    """The table, the failures in full, the file; 1 if anything failed."""
    columns = [
        Column("op"),
        Column("impl"),
        Column("dtype"),
        Column("cases", is_number=True),
        Column("refused", is_number=True),
        Column("failed", is_number=True),
        Column("worst error", is_number=True),
        Column(""),
    ]
    ordered = sorted(groups, key=lambda group: (group.impl != "torch", group.op))
    rows = [
        [g.op, g.impl, g.dtype]
        + [str(g.cases), str(g.refused), str(g.failed), f"{g.worst:.0%}", g.note]
        for g in ordered
    ]
    bad = [number for number, group in enumerate(ordered) if group.failed]
    print_table(columns, rows, bad_rows=bad)
    print("\nworst error: as a share of what is allowed (twice eager torch's own, plus rounding);")
    print("refused: problems that an implementation leaves to others")
    failed, cases = sum(g.failed for g in groups), sum(g.cases for g in groups)
    for group in ordered:
        for failure in group.failures:
            print(f"FAILED {group.impl}: {failure}")
    print(f"\n{cases - failed} of {cases} results are right" + (f", {failed} WRONG" * bool(failed)))
    if json_path:
        content: dict[str, Any] = {"header": make_header(), "cases": cases, "failed": failed}
        write_json(json_path, {**content, "groups": [asdict(group) for group in ordered]})
    return 1 if failed else 0
