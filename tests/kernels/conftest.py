"""Memory is NaN until somebody writes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loraplex.testing import poisoned_memory


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    with poisoned_memory():
        yield
