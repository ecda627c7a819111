"""DeepSpeed on a CPU compiles operators at their first use: avoids it, and warns of stale locks."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

SHARED_MEMORY_OP = "deepspeed_shm_comm"
STALE_SECONDS = 600.0  # a younger lock may belong to a compilation that is running


def extensions_root() -> Path:
    """The folder of operators that torch compiled: TORCH_EXTENSIONS_DIR or its default."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def stale_locks(root: Path) -> list[Path]:
    """Lock files that killed compilations left behind; a job that finds one waits for ever.

    Args:
        root: a torch extensions folder.
    """
    locks = [*root.glob("*/lock"), *root.glob("*/*/lock")]
    now = time.time()
    return [lock for lock in sorted(locks) if now - lock.stat().st_mtime > STALE_SECONDS]


def warn_of_stale_locks(root: Path) -> None:
    """Warn of lock files that make a compilation hang, and say what to do."""
    locks = stale_locks(root)
    if locks:
        warnings.warn(
            f"an operator's compilation was killed once and left {', '.join(map(str, locks))}: "
            f"a job that needs this operator waits for ever; delete the file",
            RuntimeWarning,
            stacklevel=3,
        )


@contextmanager
def without_shared_memory_op() -> Iterator[None]:
    """In this context DeepSpeed initialises without compiling its shared-memory operator.

    That saves half a minute at the first start and needs no C++ compiler; all-reduces go through
    gloo. A process group that is initialised inside keeps gloo after the context ends.
    """
    import deepspeed.ops

    compatible = deepspeed.ops.__compatible_ops__
    was_compatible = compatible.get(SHARED_MEMORY_OP, False)
    compatible[SHARED_MEMORY_OP] = False
    try:
        yield
    finally:
        compatible[SHARED_MEMORY_OP] = was_compatible
