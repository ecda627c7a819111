"""What a step of a ring costs the host that starts it: Python, launches and messages, no waiting.

One process plays one rank of many: torch's "fake" process group delivers nothing, and shards are so
short that the operator takes a few microseconds. Ours beside ring-flash-attn, both on torch's
operator for CPUs.

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
from measure import cores_and_load, cpu_name
from peer_adapters import Attend, Setup, add_flash_attn_stand_in, schemes_of
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm.process_group import GroupComm
from wf_backends.comm.protocol import CONTROL, Message, Pending

SHARD, HEADS, HEAD_DIM = 16, 4, 16
Times = tuple[float, float]  # seconds of a forward, of a backward


class Alone(GroupComm):
    """A rank whose peers all say what it says: they agree with it, and send nothing else."""

    spent = 0.0
    """Seconds that it took to write what peers say, which a network does at no cost to the host."""

    def post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """As the group's; of headers, what is sent as what arrives where both have one shape."""
        if label in CONTROL:
            start = time.perf_counter()
            for (_, sent), (_, arriving) in zip(sends, recvs, strict=False):
                if sent.shape == arriving.shape and not sent.is_floating_point():
                    arriving.copy_(sent)
            self.spent += time.perf_counter() - start
        return super().post(label, sends, recvs)


@contextmanager
def one_of(size: int, rank: int) -> Iterator[Alone]:
    """This process as one rank of a job of so many."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield Alone()
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
    print(f"Shards of {SHARD} rows, {HEADS} heads of {HEAD_DIM}, float32, causal, zigzag.")
    print("Microseconds of a step, median (least), forward and backward:\n")
    print("| ranks | scheme | forward | backward |\n|---|---|---|---|")
    for size in map(int, args.ranks.split(",")):
        report(size, args.repeats)


def report(size: int, repeats: int) -> None:
    """The rows of a job of so many ranks."""
    setup = Setup(size // 2, size, size * SHARD)
    config = SequenceParallelConfig(sequence_parallel_size=size, route="ring")
    with one_of(size, setup.rank) as alone:
        ours = partial(SequenceParallel(config, alone).attention, causal=True)
        theirs = schemes_of("ring-flash-attn", setup)["zigzag ring"]().attend
        found = {"ours: ring": ours, "ring-flash-attn: zigzag ring": theirs}
        times = take_turns([partial(once, attend, alone) for attend in found.values()], repeats)
    for name, several in zip(found, times, strict=True):
        there, back = (
            sorted(1e6 * each / size for each in way) for way in zip(*several, strict=True)
        )
        cells = (f"{statistics.median(one):.0f} ({one[0]:.0f})" for one in (there, back))
        print(f"| {size} | {name} | {' | '.join(cells)} |")
    print(f"| 1 | torch's operator alone | {' | '.join(f'{1e6 * x:.0f}' for x in operator())} |")


def take_turns(runs: Sequence[Callable[[], Times]], repeats: int) -> list[list[Times]]:
    """Several times of each, in turns, after a warm-up."""
    for run in runs:
        run()
    rounds = [[run() for run in runs] for _ in range(repeats)]
    return [list(one) for one in zip(*rounds, strict=True)]


def once(attend: Attend | Callable[..., Tensor], alone: Alone) -> Times:
    """One call on this rank's rows, forward and backward, without what `alone` spent."""
    q, k, v = (torch.zeros(1, SHARD, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    dout = torch.zeros(1, SHARD, HEADS, HEAD_DIM)
    start, alone.spent = time.perf_counter(), 0.0
    out = attend(q, k, v)
    middle = time.perf_counter()
    out.backward(dout)
    return middle - start - alone.spent, time.perf_counter() - middle


def operator() -> Times:
    """Forward and backward of one full tile, nothing around it."""
    aten: Any = torch.ops.aten
    there = aten._scaled_dot_product_flash_attention_for_cpu.default
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    x = torch.zeros(1, HEADS, SHARD, HEAD_DIM)
    out, lse = there(x, x, x)
    count = 300
    times = []
    for run in (partial(there, x, x, x), partial(back, x, x, x, x, out, lse, 0.0, False)):
        start = time.perf_counter()
        for _ in range(count):
            run()
        times.append((time.perf_counter() - start) / count)
    return times[0], times[1]


if __name__ == "__main__":
    main()
