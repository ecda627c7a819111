"""What one step costs on every rank of a job: time, messages, bytes, memory."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wf_backends.comm import all_to_all
from wf_backends.comm.protocol import CONTROL, Communicator, Message, Pending

Step = Callable[[], float]  # forward and backward; the sum of the squares of this rank's output


def attempt(part: Callable[[], object]) -> None:
    """One part of a benchmark, and its seconds; if it fails, the others go on."""
    start = time.perf_counter()
    try:
        part()
    except Exception:
        traceback.print_exc()
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    print(f"<!-- {time.perf_counter() - start:.1f} s -->", flush=True)


class Counting(Communicator):
    """Another communicator, with the collectives of a step counted by label.

    It asks for no turns: an exchange is posted at once, so that it counts once.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.rank, comm.size)
        self.inner, self.on_host = comm, comm.on_host
        self.posts: Counter[str] = Counter()

    def post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        if label not in CONTROL:
            self.posts[label] += 1
        return super().post(label, sends, recvs)

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        return self.inner._post(label, sends, recvs)

    def take(self) -> tuple[int, int]:
        """(collectives, bytes sent) since the last call."""
        found = sum(self.posts.values()), sum(self.sent.values())
        self.posts.clear()
        self.sent.clear()
        return found


@dataclass(frozen=True, slots=True)
class Measured:
    """The slowest rank's seconds, the largest rank's bytes and memory, of one step."""

    seconds: float
    collectives: int
    bytes_sent: int
    peak_bytes: int


def measure(comm: Counting, steps: Sequence[Callable[[], object]], repeats: int) -> list[Measured]:
    """Each step's best time of several; the steps take turns, so that all meet the same machine."""
    best = [float("inf")] * len(steps)
    rest = [(0, 0, 0)] * len(steps)
    for _ in range(repeats + 1):
        for index, step in enumerate(steps):
            before = reset_peak()
            comm.take()
            everyones(comm, 0)  # all start together
            start = time.perf_counter()
            step()
            seconds = time.perf_counter() - start
            rest[index] = (*comm.take(), peak() - before)
            best[index] = min(best[index], everyones(comm, seconds).max().item())
    return [
        Measured(seconds, *(int(everyones(comm, value).max()) for value in values))
        for seconds, values in zip(best, rest, strict=True)
    ]


def check_same(comm: Counting, steps: Sequence[Step]) -> None:
    """Run every step once; all must return the same, summed over the ranks.

    Raises:
        RuntimeError: if they differ by more than float32's rounding.
    """
    totals = torch.stack([everyones(comm, step()).sum() for step in steps])
    if (totals / totals[0] - 1).abs().max() > 1e-4:
        raise RuntimeError(f"the schemes do not compute the same: {totals.tolist()}")


def everyones(comm: Counting, value: float) -> Tensor:
    """(P,) float64: the values of all ranks."""
    own = torch.tensor([value], dtype=torch.float64)
    parts = all_to_all(comm.inner, "figures", [own] * comm.size, [own.shape] * comm.size)
    return torch.cat(parts)


def reset_peak() -> int:
    """Give freed memory back, start a new peak (Linux); bytes held now."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """The most bytes that this process held since `reset_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def machine(comm: Counting) -> str:
    """torch's version, the CPU, and how the ranks share it."""
    ranks = f"{comm.size} ranks, {type(comm.inner).__name__}"
    return f"torch {torch.__version__}, {cpu_name()}; {ranks}, {cores_and_load()}"


def cpu_name() -> str:
    """The maker's name of the CPU (Linux), or what Python knows of it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def cores_and_load() -> str:
    """How many cores there are, and how many processes wanted one in the last minute."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
