"""Chooses the machine's path for the whole test run: the GPU, or Triton's interpreter on CPU."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# The shipped tables decide in tests, whatever was tuned on this machine.
os.environ["LORAPLEX_TUNING_DIR"] = ""

import torch

# Triton reads this when a kernel is defined, so it has to be set before any module with kernels.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest

# Interpreted kernels and first-time compilation are slow without being wrong.
hypothesis.settings.register_profile("loraplex", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("loraplex")

SKIP_GPU = pytest.mark.skip(reason="needs a GPU")
SKIP_INTERPRETER = pytest.mark.skip(reason="runs in Triton's interpreter, which is off on a GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_gpu = torch.cuda.is_available()
    for item in items:
        if not has_gpu and item.get_closest_marker("gpu"):
            item.add_marker(SKIP_GPU)
        if has_gpu and item.get_closest_marker("interpreter"):
            item.add_marker(SKIP_INTERPRETER)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that tests run on: the GPU if there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(scope="session")
def has_gpu() -> bool:
    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
