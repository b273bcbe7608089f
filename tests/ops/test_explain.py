"""``explain`` says what would run, and refuses what would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import loraplex as lp
from loraplex.ops.impls import TRITON_IMPLS, has_aligned_rows, names

GOOD: dict[str, Any] = {
    "m": 64, "k": 4096, "slices": (4096, 1024), "num_adapters": 8, "max_rank": 16,
    "dtype": torch.float16,
}  # fmt: skip


@pytest.mark.parametrize(("op", "impl"), [(op, i) for op in TRITON_IMPLS for i in names(op)])
def test_every_choice(op: str, impl: str, device: torch.device) -> None:
    explanation = lp.explain(op, **GOOD, device=device, impl=impl)
    choice = explanation.choice
    assert choice.impl == impl or impl in ("auto", "triton")
    assert choice.impl == "torch" or choice.impl in TRITON_IMPLS[op]
    text = str(explanation)
    assert text.startswith(f"{op}: {choice.impl} ({choice.reason})")
    assert "M=64 K=4096 slices=[4096, 1024] L=8 R_max=16 float16" in text
    for kernel, config in choice.configs.items():
        assert f"{kernel}: " + " ".join(f"{key}={value}" for key, value in config.items()) in text


def test_auto_on_the_host_says_why() -> None:
    explanation = lp.explain("matmul", **GOOD, device="cpu")
    assert explanation.choice.impl == "torch"
    assert "tensors are on cpu" in explanation.choice.reason


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"op": "add"}, ValueError, "op must be one of lora_linear, .* got 'add'"),
        ({"op": ["matmul"]}, ValueError, r"op must be one of .* got \['matmul'\]"),
        ({"device": "nowhere"}, ValueError, "device must be usable here, got 'nowhere'"),
        ({"device": None}, TypeError, "device must be a torch.device or its name, got None"),
        ({"impl": None}, TypeError, "impl must be one of auto, torch, .* got None"),
        ({"m": -1}, ValueError, "m must be >= 0, got -1"),
        ({"m": 1.5}, TypeError, "m must be an int, got 1.5"),
        ({"k": 0}, ValueError, "k must be >= 1, got 0"),
        ({"slices": ()}, ValueError, "slices must have at least one width"),
        ({"slices": 8}, TypeError, "slices must be a sequence of ints, got 8"),
        ({"dtype": torch.int8}, TypeError, "dtype must be a floating dtype .* got torch.int8"),
        ({"dtype": "float16"}, TypeError, "dtype must be a floating dtype .* got 'float16'"),
        ({"slices": (8, 0)}, ValueError, r"slices\[1\] must be >= 1, got 0"),
        ({"num_adapters": -1}, ValueError, "num_adapters must be >= 0, got -1"),
        ({"max_rank": -1}, ValueError, "max_rank must be >= 0, got -1"),
        ({"impl": "fast"}, ValueError, "impl must be one of auto, torch, .* got 'fast'"),
        ({"impl": "triton", "dtype": torch.float64}, lp.UnsupportedImplError, "float64"),
    ],
)
def test_bad_arguments(
    change: dict[str, Any], error: type[Exception], words: str, device: torch.device
) -> None:
    arguments = {"op": "matmul", **GOOD, "device": device} | change
    with pytest.raises(error, match=words):
        lp.explain(**arguments)


def test_overlapping_rows_take_no_vectors_or_descriptors() -> None:
    apart = torch.zeros(4, 64, dtype=torch.float16)
    assert has_aligned_rows(apart)
    assert has_aligned_rows(torch.zeros(4, 128, dtype=torch.float16)[:, :64])
    # the copy engine wants rows further apart than they are long
    assert not has_aligned_rows(apart[:1].expand(4, 64))
    assert not has_aligned_rows(apart.view(-1).as_strided((4, 64), (32, 1)))
