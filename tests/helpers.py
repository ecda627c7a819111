"""What tests share: ranks as threads, as processes and as MPI processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from wf_backends.comm import threads

T = TypeVar("T")


def run_threads(size: int, fn: Callable[..., T], *args: object, timeout: float = 60.0) -> list[T]:
    """Run `fn(comm, *args)` on `size` ranks as threads, one core each; the results by rank."""

    def one_core(comm: threads.ThreadComm, *args: object) -> T:
        torch.set_num_threads(1)
        return fn(comm, *args)

    return threads.run_threads(size, one_core, *args, timeout=timeout)
