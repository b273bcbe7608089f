"""Every table that is shipped: its form, its block sizes, and that it answers every problem."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
import torch

from loraplex.ops.impls import TRITON_IMPLS
from loraplex.tuning import Problem, choose
from loraplex.tuning.choose import BLOCKS, CONFIG_KEYS, KERNELS, check_table

SHIPPED = sorted(
    entry.name
    for entry in resources.files("loraplex.tuning").joinpath("tables").iterdir()
    if entry.name.endswith(".json")
)
# Bytes that one program may have on the smallest GPUs that fall back to the default table
# (sm_86, sm_89, sm_120: 99 KiB).
SMALLEST_SHARED = 99 * 1024
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}


def load(name: str) -> dict[str, Any]:
    text = resources.files("loraplex.tuning").joinpath("tables", name).read_text()
    table: dict[str, Any] = json.loads(text)
    return table


def rules(name: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Op, number and rule."""
    for op, listed in load(name).items():
        if op != "about":
            yield from ((op, number, rule) for number, rule in enumerate(listed))


def configs(name: str) -> Iterator[tuple[str, dict[str, int], dict[str, Any]]]:
    """Where it stands, the config of one kernel, and its rule."""
    for op, number, rule in rules(name):
        for kernel in KERNELS:
            if kernel in rule:
                yield f"{name}, {op}, rule {number}, {kernel}", rule[kernel], rule


def test_there_is_a_default() -> None:
    assert "default.json" in SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
class TestTable:
    def test_form(self, name: str) -> None:
        check_table(name, load(name))

    def test_says_what_it_is(self, name: str) -> None:
        assert load(name)["about"]

    def test_implementations_exist(self, name: str) -> None:
        for op, number, rule in rules(name):
            assert rule["impl"] in TRITON_IMPLS[op], f"{op}, rule {number}"

    def test_blocks_are_powers_of_two_from_16(self, name: str) -> None:
        for where, config, _ in configs(name):
            for key in BLOCKS:
                size = config.get(key, 16)
                assert size >= 16, f"{where}: {key}={size}"
                assert size & (size - 1) == 0, f"{where}: {key}={size}"

    def test_other_numbers_make_sense(self, name: str) -> None:
        for where, config, _ in configs(name):
            assert config, where
            assert all(type(value) is int for value in config.values()), where
            assert config.get("num_warps", 4) in (1, 2, 4, 8, 16), where
            assert 1 <= config.get("num_stages", 1) <= 8, where
            assert config.get("split_k", 1) >= 1, where
            assert config.get("group_m", 1) >= 1, where
            assert set(config) <= CONFIG_KEYS, where

    def test_descriptors_are_for_aligned_rows(self, name: str) -> None:
        for where, config, rule in configs(name):
            if config.get("has_descriptor") or config.get("is_specialized"):
                assert rule["when"]["is_vectorizable"] is True, where

    def test_no_rule_is_out_of_reach(self, name: str) -> None:
        """A rule after one of the same implementation without conditions never runs."""
        ended: set[tuple[str, str]] = set()
        for op, number, rule in rules(name):
            key = (op, rule["impl"])
            assert key not in ended, f"{op}, rule {number}"
            if not rule.get("when"):
                ended.add(key)


ARCHS = sorted(
    {"cpu", "sm_80", "gfx942", *(n.removesuffix(".json") for n in SHIPPED)} - {"default"}
)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", TRITON_IMPLS)
def test_every_problem_has_a_choice(op: str, arch: str) -> None:
    """No size, dtype, capacity or layout may end in `no rule matches`."""
    for m in (0, 1, 17, 64, 65, 300, 8192, 100_000):
        for dtype in ("float32", "float16", "bfloat16"):
            for rank, slots in ((0, 0), (1, 1), (16, 8), (512, 1000)):
                for k, slices, is_vectorizable in ((1, (1,), False), (4096, (4096, 1024), True)):
                    problem = Problem(op, m, k, slices, slots, rank, dtype, arch, is_vectorizable)
                    choice = choose(problem)
                    assert choice.impl in TRITON_IMPLS[op]
                    for impl in TRITON_IMPLS[op][:1]:
                        choose(problem, impl)


def operand_bytes(config: dict[str, int], size: int) -> int:
    """Shared memory of the operands of one pipelined dot, all stages."""
    inner = config.get("block_k", config.get("block_r", 16))
    left = config.get("block_m", 64)
    right = config.get("block_n", config.get("block_r", 16))
    return (left + right) * inner * size * config.get("num_stages", 1)


@pytest.mark.parametrize("size", [2, 4], ids=["half", "float32"])
@pytest.mark.parametrize("name", SHIPPED)
def test_K32_blocks_fit_the_shared_memory(name: str, size: int) -> None:
    """The default table serves every GPU without one of its own, so it must suit the smallest.

    tests/compile compiles each shipped choice for real architectures and reads what it takes.
    """
    limit = SHARED.get(name.removesuffix(".json"), SMALLEST_SHARED)
    for where, config, rule in configs(name):
        dtypes = rule.get("when", {}).get("dtype", ["float32", "float16", "bfloat16"])
        if not any(getattr(torch, dtype).itemsize == size for dtype in dtypes):
            continue
        if size == 4 and "dtype" not in rule.get("when", {}):
            continue  # float32 has rules of its own, before these
        if "block_m" in config or "block_k" in config:
            assert operand_bytes(config, size) <= limit, where
