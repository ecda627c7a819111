"""What tests on a GPU share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def no_tf32() -> Iterator[None]:
    """Products and convolutions of float32 are in float32; afterwards the GPU's memory is free."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    previous = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, allowed in zip(backends, previous, strict=True):
        backend.allow_tf32 = allowed
    gc.collect()
    torch.cuda.empty_cache()
