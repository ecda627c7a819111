"""What DeepSpeed does on a CPU that surprises: it compiles operators at first use."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

SHARED_MEMORY_OP = "deepspeed_shm_comm"
STALE = 600.0
"""Seconds; a younger lock may belong to a compilation that runs now."""


def extensions_root() -> Path:
    """Where torch keeps the operators it compiled: TORCH_EXTENSIONS_DIR or its default."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def stale_locks(root: Path) -> list[Path]:
    """Lock files that a killed compilation left behind; a job that meets one waits for ever.

    Args:
        root: a torch extensions folder.
    """
    locks = [*root.glob("*/lock"), *root.glob("*/*/lock")]
    now = time.time()
    return [lock for lock in sorted(locks) if now - lock.stat().st_mtime > STALE]


def warn_of_stale_locks(root: Path) -> None:
    """Say which lock files will make a compilation hang, and what to do."""
    if locks := stale_locks(root):
        warnings.warn(
            f"an operator's compilation was killed once and left {', '.join(map(str, locks))}: "
            f"a job that needs this operator waits for ever; delete the file",
            RuntimeWarning,
            stacklevel=3,
        )


@contextmanager
def without_shared_memory_op() -> Iterator[None]:
    """Inside, DeepSpeed's process group starts without compiling its shared-memory operator.

    That saves half a minute at the first start and the need for a C++ compiler; all-reduces then
    go through gloo. Undone on leaving; what was initialised inside stays as it is.
    """
    import deepspeed.ops

    table = deepspeed.ops.__compatible_ops__
    before = table.get(SHARED_MEMORY_OP, False)
    table[SHARED_MEMORY_OP] = False
    try:
        yield
    finally:
        table[SHARED_MEMORY_OP] = before
