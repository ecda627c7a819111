"""DeepSpeed on a CPU compiles operators at their first use: avoids it, and warns of stale locks."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

from torch.utils.cpp_extension import get_default_build_root

SHARED_MEMORY_OP = "deepspeed_shm_comm"
STALE_SECONDS = 10.0  # ranks of one job start within that: a younger lock may be their own


def stale_locks(root: Path) -> list[Path]:
    """Lock files of other jobs' compilations; one that was killed leaves its file for ever."""
    locks = list[Path]()
    for lock in sorted((*root.glob("*/lock"), *root.glob("*/*/lock"))):
        with suppress(FileNotFoundError):  # its compilation has just ended
            if time.time() - lock.stat().st_mtime > STALE_SECONDS:
                locks.append(lock)
    return locks


def warn_of_stale_locks(root: Path | None = None) -> None:
    """Warn of lock files for which a compilation waits, and say what to do. `root` is the folder of
    operators that torch compiled; None: TORCH_EXTENSIONS_DIR or its default."""
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    locks = stale_locks(root or Path(folder))
    if locks:
        warnings.warn(
            f"another job compiles an operator, or was killed meanwhile and left "
            f"{', '.join(map(str, locks))}: a job that needs this operator waits, without a word, "
            f"until the file is gone; if no other job compiles now, delete the file",
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

    with mock.patch.dict(deepspeed.ops.__compatible_ops__, {SHARED_MEMORY_OP: False}):
        yield
