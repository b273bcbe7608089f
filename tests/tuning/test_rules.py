"""Every rule of every shipped table computes the right thing, for whatever GPU it was tuned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
import torch

import loraplex as lp
from loraplex import env
from loraplex.bench.verdict import judge
from loraplex.testing import Case, build, eager, poisoned_memory, truth, tuning_table

ALIGNED = Case(
    "rule_aligned", m=19, k=208, slices=(72, 40), ranks=(8, 24, 0, 16), indices="mixed",
    max_rank=32,
)  # fmt: skip
ODD = Case("rule_odd", m=19, k=203, slices=(71, 40), ranks=(3, 24, 0, 16), indices="mixed", x="odd")


def rules() -> Iterator[Any]:
    """Op and rule, with an id that says where it stands."""
    for entry in resources.files("loraplex.tuning").joinpath("tables").iterdir():
        if not entry.name.endswith(".json"):
            continue
        for op, listed in json.loads(entry.read_text()).items():
            for number, rule in enumerate(listed if op != "about" else ()):
                if any(isinstance(rule[key], dict) for key in rule if key != "when"):
                    name = f"{entry.name.removesuffix('.json')}-{op}-{number}-{rule['impl']}"
                    # Triton's interpreter does not run Gluon
                    is_gluon = "is_specialized" in rule.get("linear", {})
                    yield pytest.param(op, rule, id=name, marks=[pytest.mark.gpu] * is_gluon)


@pytest.mark.parametrize(("op", "rule"), list(rules()))
def test_rule(op: str, rule: dict[str, Any], device: torch.device) -> None:
    if "is_specialized" in rule.get("linear", {}) and env.gpu_arch(0) != "sm_90":
        pytest.skip("written for Hopper")
    when = rule.get("when", {})
    dtypes = when.get("dtype", ["float16"])
    dtype = torch.float16 if "float16" in dtypes else getattr(torch, dtypes[0])
    needs_alignment = when.get("is_vectorizable", False) or any(
        config.get("has_descriptor") for config in rule.values() if isinstance(config, dict)
    )
    case = ALIGNED if needs_alignment else ODD
    # the rule alone, whatever sizes and GPU it is meant for
    table = {op: [{key: value for key, value in rule.items() if key != "when"}]}
    with tuning_table(table), poisoned_memory():
        if op == "matmul":
            check_product(rule["impl"], dtype, device)
            return
        inputs = build(case, dtype, device)
        result = inputs.run(op, rule["impl"])
        verdict = judge(result, eager(op, inputs), truth(op, inputs))
    assert verdict.is_correct, str(verdict)


def check_product(impl: str, dtype: torch.dtype, device: torch.device) -> None:
    x, c = (
        torch.randn(35, 136, device=device).to(dtype),
        torch.randn(136, 72, device=device).to(dtype),
    )
    y, b = x[:, :24], c[:24]
    result = lp.fused_matmul_expand(x, c, y, b, impl=impl)
    truth = x.double() @ c.double() + y.double() @ b.double()
    verdict = judge(result, x @ c + y @ b, truth)
    assert verdict.is_correct, str(verdict)
