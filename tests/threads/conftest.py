"""Memory that nobody wrote holds NaN here, so that what is added to it cannot pass for a number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty gives
    yield
    torch.use_deterministic_algorithms(False)
