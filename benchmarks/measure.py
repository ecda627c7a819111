"""Measure steps on all ranks of a job: time, collectives, bytes sent, memory. And print tables."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from wf_backends import launch
from wf_backends.comm import make_comm, sum_over_ranks
from wf_backends.comm.protocol import CONTROL, Communicator, Message, Pending

T = TypeVar("T")
Step = Callable[[], float]  # forward and backward; the sum of the squares of this rank's output


def attempt(part: Callable[[], T]) -> T | None:
    """Run one part of a benchmark and print its seconds; an exception is printed, not raised.

    Returns:
        The result of `part`; None if it failed.
    """
    start, result = time.perf_counter(), None
    try:
        result = part()
    except Exception:
        traceback.print_exc()
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    print(f"<!-- {time.perf_counter() - start:.1f} s -->", flush=True)
    return result


class Counting(Communicator):
    """Wraps a communicator; counts collectives by label.

    An exchange between all ranks is one call of `post`, so it counts as one collective.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.rank, comm.size)
        self.inner = comm
        self.on_host = comm.on_host
        self.posts: Counter[str] = Counter()

    def post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        if label not in CONTROL:
            self.posts[label] += 1
        return super().post(label, sends, recvs)

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        return self.inner._post(label, sends, recvs)

    def take(self) -> tuple[int, int]:
        """(collectives, bytes sent) since the last call of `take`."""
        counts = sum(self.posts.values()), sum(self.sent.values())
        self.posts.clear()
        self.sent.clear()
        return counts


@contextmanager
def counting_job() -> Iterator[Counting]:
    """Join the ranks of the job; yields a counting communicator. Each rank has one thread."""
    torch.set_num_threads(1)
    with closing(launch.init()):
        yield Counting(make_comm())


@dataclass(frozen=True, slots=True)
class Scheme:
    """A name, a step, and the units that it must send with a full mask."""

    name: str
    step: Step
    units: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one step; each is the largest of all ranks."""

    seconds: float
    collectives: int
    bytes_sent: int
    peak_bytes: int


def loss_step(x: Tensor, layer: Callable[[Tensor], Tensor]) -> Step:
    """A step of a layer with input x: forward and backward of the sum of the outputs' squares."""
    leaf = x.detach().clone().requires_grad_()

    def step() -> float:
        loss = layer(leaf).square().sum()
        loss.backward()
        leaf.grad = None
        return loss.item()

    return step


def measure(comm: Counting, steps: Sequence[Callable[[], object]], repeats: int) -> list[Measured]:
    """The best time of each step after a warm-up; steps take turns, as the load varies."""
    best = [float("inf")] * len(steps)
    counts = [(0, 0, 0)] * len(steps)  # collectives, bytes sent, peak bytes
    for _ in range(repeats + 1):
        for index, step in enumerate(steps):
            bytes_before = reset_peak()
            comm.take()
            gather_values(comm.inner, 0)  # all start together
            start = time.perf_counter()
            step()
            seconds = time.perf_counter() - start
            counts[index] = (*comm.take(), peak() - bytes_before)
            best[index] = min(best[index], gather_values(comm.inner, seconds).max().item())
    return [
        Measured(seconds, *(int(gather_values(comm.inner, value).max()) for value in values))
        for seconds, values in zip(best, counts, strict=True)
    ]


def compare(comm: Counting, schemes: Sequence[Scheme], repeats: int) -> list[Measured]:
    """Check that all schemes compute the same result, then `measure` them.

    Raises:
        RuntimeError: if the results, summed over the ranks, differ by more than float32's rounding.
    """
    totals = torch.stack([gather_values(comm.inner, scheme.step()).sum() for scheme in schemes])
    if not (totals / totals[0] - 1).abs().max() <= 1e-4:  # also if one is NaN
        raise RuntimeError(f"the schemes do not compute the same: {totals.tolist()}")
    return measure(comm, [scheme.step for scheme in schemes], repeats)


def gather_values(comm: Communicator, value: float) -> Tensor:
    """The values of all ranks, (P,) float64."""
    values = torch.zeros(comm.size, dtype=torch.float64)
    values[comm.rank] = value
    return sum_over_ranks(comm, values)


def last_lines(command: Sequence[str], ranks: int, environment: Mapping[str, str]) -> list[str]:
    """Run a job of `ranks` ranks on this machine; the last line that each rank prints.

    Args:
        environment: variables to add.

    Raises:
        RuntimeError: if a rank fails; its error is on stderr.
    """
    port = _free_port()
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **_launch_variables(rank, ranks, port), **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank of {command} failed")
    return [text.splitlines()[-1] for text in printed]


def become_only_rank() -> None:
    """Set the variables of a launcher for a job that consists of this process."""
    os.environ.update(_launch_variables(0, 1, _free_port()))


def _launch_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets, for a job on this machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    variables = {name: str(number) for name, number in numbers.items()}
    return variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cuda_seconds(run: Callable[[], object]) -> float:
    """Seconds of a run on the GPU, between two CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def reset_peak() -> int:
    """Return freed memory to the system and reset the peak (Linux); returns the bytes held now."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """The largest number of bytes that this process held since `reset_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    """A field of /proc/self/status, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields[name].split()[0])


def machine(comm: Counting) -> str:
    """torch's version, the CPU, and how the ranks share it."""
    ranks = f"{comm.size} ranks, {type(comm.inner).__name__}"
    return f"torch {torch.__version__}, {cpu_name()}; {ranks}, {cores_and_load()}"


def cpu_name() -> str:
    """The model name of the CPU (Linux), or Python's name of it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def cores_and_load() -> str:
    """The number of cores, and the load average of the last minute."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def table_row(*cells: object) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def table_head(*columns: str) -> str:
    """The head of a Markdown table, two lines."""
    return f"{table_row(*columns)}\n|{'---|' * len(columns)}"


def print_row(*cells: object) -> None:
    print(table_row(*cells), flush=True)


def print_head(*columns: str) -> None:
    print(table_head(*columns), flush=True)


def print_columns(formats: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table of fixed width; `formats`: by head, the format of the cells, such as "9.2f".

    The first column has names, and a width as format, such as "26"; the others have numbers.
    """
    first, *others = formats
    heads = "".join(f"{head:>{formats[head].partition('.')[0]}}" for head in others)
    print(f"{first:{formats[first]}}{heads}")
    for row in rows:
        print("".join(f"{cell:{spec}}" for cell, spec in zip(row, formats.values(), strict=True)))
