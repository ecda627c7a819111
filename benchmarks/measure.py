"""What one step costs on every rank of a job: time, messages, bytes, memory."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import socket
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wf_backends import launch
from wf_backends.comm import make_comm, sum_over_ranks
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


@contextmanager
def counting_job() -> Iterator[Counting]:
    """All ranks of this job, one thread each."""
    torch.set_num_threads(1)
    with closing(launch.init()):
        yield Counting(make_comm())


@dataclass(frozen=True, slots=True)
class Scheme:
    """A name, a step, and the units that it must send when all tokens see all others."""

    name: str
    step: Step
    units: float


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
            gather_values(comm.inner, 0)  # all start together
            start = time.perf_counter()
            step()
            seconds = time.perf_counter() - start
            rest[index] = (*comm.take(), peak() - before)
            best[index] = min(best[index], gather_values(comm.inner, seconds).max().item())
    return [
        Measured(seconds, *(int(gather_values(comm.inner, value).max()) for value in values))
        for seconds, values in zip(best, rest, strict=True)
    ]


def compare(comm: Counting, schemes: Sequence[Scheme], repeats: int) -> list[Measured]:
    """`measure` of schemes that return the same, summed over the ranks.

    Raises:
        RuntimeError: if they differ by more than float32's rounding.
    """
    totals = torch.stack([gather_values(comm.inner, scheme.step()).sum() for scheme in schemes])
    if (totals / totals[0] - 1).abs().max() > 1e-4:
        raise RuntimeError(f"the schemes do not compute the same: {totals.tolist()}")
    return measure(comm, [scheme.step for scheme in schemes], repeats)


def gather_values(comm: Communicator, value: float) -> Tensor:
    """(P,) float64: the values of all ranks."""
    values = torch.zeros(comm.size, dtype=torch.float64)
    values[comm.rank] = value
    return sum_over_ranks(comm, values)


def last_lines(command: Sequence[str], ranks: int, more: Mapping[str, str]) -> list[str]:
    """The last line that each rank of a job on this machine prints.

    Args:
        more: variables of the environment.

    Raises:
        RuntimeError: if a rank fails; it has said why on stderr.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **more}
    jobs = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = [job.communicate()[0] for job in jobs]
    if any(job.returncode for job in jobs):
        raise RuntimeError(f"a rank of {command} failed")
    return [text.splitlines()[-1] for text in printed]


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
