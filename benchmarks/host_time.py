"""Host time of a ring step: Python, kernel launches and the posting of messages, without waiting.

One process acts as one rank of many: torch's "fake" process group delivers nothing, and shards are
so short that the operator takes a few microseconds. Compares our ring with ring-flash-attn, both on
torch's CPU operator.

    python benchmarks/host_time.py --ranks 8,64
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measure import cores_and_load, cpu_name, print_head, print_row
from peer_adapters import Attend, Setup, add_flash_attn_stand_in, schemes_of
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm.process_group import GroupComm
from wf_backends.comm.protocol import CONTROL, Message, Pending

SHARD_ROWS, HEADS, HEAD_DIM = 16, 4, 16
Times = tuple[float, float]  # seconds of a forward, of a backward


class FakePeersComm(GroupComm):
    """A rank without peers: it receives copies of its own headers, and no rows."""

    header_seconds = 0.0
    """Time of copying the headers, to be subtracted: a network writes them without the host."""

    def post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Post as the group does; a received header is a copy of the sent one of the same shape."""
        if label in CONTROL:
            start = time.perf_counter()
            for (_, sent), (_, received) in zip(sends, recvs, strict=False):
                if sent.shape == received.shape and not sent.is_floating_point():
                    received.copy_(sent)
            self.header_seconds += time.perf_counter() - start
        return super().post(label, sends, recvs)


@contextmanager
def fake_job(size: int, rank: int) -> Iterator[FakePeersComm]:
    """Make this process one rank of a job of `size` ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield FakePeersComm()
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="8,64", help="separated by commas")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    add_flash_attn_stand_in()
    print(f"torch {torch.__version__}, {cpu_name()}, {cores_and_load()}")
    print(f"Shards of {SHARD_ROWS} rows, {HEADS} heads of {HEAD_DIM}, float32, causal, zigzag.")
    print("Microseconds of a step, median (least), forward and backward:\n")
    print_head("ranks", "scheme", "forward", "backward")
    for size in map(int, args.ranks.split(",")):
        report(size, args.repeats)


def report(size: int, repeats: int) -> None:
    """Print the rows of a job of `size` ranks."""
    setup = Setup(size // 2, size, size * SHARD_ROWS)
    config = SequenceParallelConfig(sequence_parallel_size=size, route="ring")
    with fake_job(size, setup.rank) as comm:
        ours = partial(SequenceParallel(config, comm).attention, causal=True)
        theirs = schemes_of("ring-flash-attn", setup)["zigzag ring"]().attend
        schemes = {"ours: ring": ours, "ring-flash-attn: zigzag ring": theirs}
        runs = [partial(time_once, attend, comm) for attend in schemes.values()]
        times = take_turns(runs, repeats)
    for name, times_of_scheme in zip(schemes, times, strict=True):
        cells = []
        for seconds in zip(*times_of_scheme, strict=True):  # forward, backward
            step_us = [1e6 * x / size for x in seconds]
            cells.append(f"{statistics.median(step_us):.0f} ({min(step_us):.0f})")
        print_row(size, name, *cells)
    cells = [f"{1e6 * seconds:.0f}" for seconds in time_operator()]
    print_row(1, "torch's operator alone", *cells)


def take_turns(runs: Sequence[Callable[[], Times]], repeats: int) -> list[list[Times]]:
    """Times of each run, by repeat; runs take turns after a warm-up."""
    for run in runs:
        run()
    rounds = [[run() for run in runs] for _ in range(repeats)]
    return [list(times) for times in zip(*rounds, strict=True)]


def time_once(attend: Attend | Callable[..., Tensor], comm: FakePeersComm) -> Times:
    """Time a forward and a backward on this rank's rows, without the headers of peers."""
    q, k, v = (torch.zeros(1, SHARD_ROWS, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    dout = torch.zeros(1, SHARD_ROWS, HEADS, HEAD_DIM)
    comm.header_seconds = 0.0
    start = time.perf_counter()
    out = attend(q, k, v)
    middle = time.perf_counter()
    out.backward(dout)
    return middle - start - comm.header_seconds, time.perf_counter() - middle


def time_operator() -> Times:
    """Time torch's operator alone, forward and backward of one full tile."""
    aten: Any = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    x = torch.zeros(1, HEADS, SHARD_ROWS, HEAD_DIM)
    out, lse = forward(x, x, x)
    run_forward = partial(forward, x, x, x)
    run_backward = partial(backward, x, x, x, x, out, lse, 0.0, False)
    return mean_seconds(run_forward), mean_seconds(run_backward)


def mean_seconds(run: Callable[[], Any], count: int = 300) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


if __name__ == "__main__":
    main()
