"""Random problems: deterministic, varied, with NaN where nothing may look."""

from __future__ import annotations

import pytest
import torch

from loraplex.bench.cases import (
    MIXES,
    OPS,
    draw_indices,
    expect,
    four_tokens,
    make_inputs,
    random_cases,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CPU = torch.device("cpu")


def test_cases_are_the_same_every_time() -> None:
    assert random_cases(50, DTYPES, is_small=False) == random_cases(50, DTYPES, is_small=False)
    assert random_cases(50, DTYPES, is_small=False) != random_cases(
        50, DTYPES, is_small=False, seed=1
    )


def test_cases_cover_what_they_promise() -> None:
    cases = random_cases(300, DTYPES, is_small=False)
    assert {(case.op, case.mix, case.dtype) for case in cases} == {
        (op, mix, dtype) for op in OPS for mix in MIXES for dtype in DTYPES
    }
    ranks = {rank for case in cases for rank in case.ranks}
    assert {0, 1, 5, 16, 256} <= ranks
    assert {1, 16, 17} <= {case.m for case in cases}
    assert any(case.base_share == 1.0 for case in cases)
    assert any(case.k % 64 for case in cases)
    assert any(len(case.slices) > 1 for case in cases)
    assert {case.index_dtype for case in cases} == {torch.int32, torch.int64}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("m", "num_adapters"), [(1, 1), (7, 3), (64, 8), (3, 8)])
def test_mixes(mix: str, m: int, num_adapters: int) -> None:
    indices = draw_indices(mix, m, num_adapters, torch.Generator().manual_seed(0))
    assert indices.shape == (m,)
    assert int(indices.min()) >= 0
    assert int(indices.max()) < num_adapters
    counts = torch.bincount(indices, minlength=num_adapters)
    if mix == "distinct":
        assert int(counts.max()) <= -(-m // num_adapters)
    if mix == "identical":
        assert int((counts > 0).sum()) == 1
    if mix == "zipf" and m == 64:
        assert int(counts.argmax()) == 0


def test_unknown_mix() -> None:
    with pytest.raises(ValueError, match="mix must be one of distinct, .* got 'even'"):
        draw_indices("even", 1, 1, torch.Generator())


def test_four_tokens() -> None:
    case = four_tokens()
    inputs = make_inputs(case, CPU)
    assert inputs.indices.tolist() == [2, 0, 1, 2]
    assert inputs.x.shape == (4, 128)
    assert inputs.a_pool.shape == (3, 16, 128)
    assert inputs.b_pool.shape == (3, 256, 16)
    base, delta = expect(case, inputs, torch.float64)
    assert float(base.abs().max()) == 0
    by_hand = inputs.scaling[1] * inputs.b_pool[1] @ (inputs.a_pool[1] @ inputs.x[2])
    torch.testing.assert_close(delta[2].float(), by_hand, rtol=1e-4, atol=1e-5)


def test_padding_is_nan_and_the_result_is_not() -> None:
    case = next(c for c in random_cases(200, DTYPES, is_small=True) if len(set(c.ranks)) > 1)
    inputs = make_inputs(case, CPU)
    assert inputs.a_pool.isnan().any()
    assert inputs.b_pool.isnan().any()
    base, delta = expect(case, inputs, torch.float64)
    assert (base + delta).isfinite().all()
