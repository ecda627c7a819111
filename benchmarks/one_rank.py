"""What one rank of many computes, in a process of its own, beside one call with the same FLOPs.

No network and no other rank: what would arrive is a copy of random rows, so a figure holds kernels,
merges and copies, and nothing that waits. The one call is torch's attention of the whole sequence
with a rank's share of the heads.

    python benchmarks/one_rank.py                          # a CPU: 4 ranks, 8,192 tokens, float32
    python benchmarks/one_rank.py --device cuda --ranks 8 --tokens 131072 --heads 32 \\
        --kv-heads 8 --head-dim 128 --dtype bfloat16 --schemes ring --rank 3
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean, median

import torch
from bytes import named_points
from layers import torch_attention
from measure import cores_and_load, cpu_name
from torch import Tensor

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm.protocol import Communicator, Message, Pending

Times = tuple[float, float]  # seconds of a forward, of a backward
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
ONE_CALL = "one call"


class Landed:
    """Messages that are there."""

    def wait(self) -> None: ...

    def poll(self) -> None: ...


class Alone(Communicator):
    """A rank whose peers agree with all that it says, and send rows of `noise`.

    Args:
        noise: for each dtype that travels one long tensor, all of it finite.
    """

    def __init__(self, rank: int, size: int, noise: Mapping[torch.dtype, Tensor]) -> None:
        super().__init__(rank, size)
        self.noise = noise
        self.on_host = all(x.device.type == "cpu" for x in noise.values())

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        said = {(x.shape, x.dtype): x for _, x in sends if not x.is_floating_point()}
        for _, x in recvs:
            if x.is_floating_point():
                x.copy_(self.noise[x.dtype][: x.numel()].view(x.shape))
            else:
                x.copy_(said[x.shape, x.dtype])
        return Landed()


class Clock:
    """Seconds of CPU time on a CPU, of the device's time elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()


def main() -> None:
    """Print the machine, the call, and a line per scheme."""
    args = parse()
    torch.set_num_threads(1)
    print(heading(args))
    head = "scheme", "forward", "backward", "x, median (least to most)", "x, least", "mean of ranks"
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    turns = take_turns(those_that_run(trials(args)), args.repeats)
    for name in turns[0]:
        print(line(name, turns), flush=True)


def heading(args: argparse.Namespace) -> str:
    """What is measured, and where."""
    cuda = args.device == "cuda"
    where = torch.cuda.get_device_name() if cuda else f"{cpu_name()}, one thread"
    return (
        f"torch {torch.__version__}, {where}, {cores_and_load()} before. One of {args.ranks} "
        f"ranks, {args.tokens} tokens, {args.heads} query and {args.kv_heads} key heads of "
        f"{args.head_dim}, {args.dtype}, causal, zigzag; {args.repeats} repeats in turns. Seconds "
        f"of {'the device' if cuda else 'CPU'} time, medians of the rank with the largest. "
        "`x`: beside the one call of the same turn; `least`: the largest rank's least beside the "
        "one call's least; `mean of ranks`: of these.\n"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--repeats", type=int, default=7, help="after a warm-up")
    parser.add_argument("--schemes", default="", help="parts of names, separated by commas")
    parser.add_argument("--rank", type=int, help="the one to play; all in turn if not given")
    args = parser.parse_args()
    if args.heads % args.ranks or args.kv_heads % args.ranks or args.tokens % (2 * args.ranks):
        parser.error("--ranks must divide --heads and --kv-heads, and twice of it --tokens")
    return args


def draw(args: argparse.Namespace, rows: int, parts: int) -> tuple[Tensor, ...]:
    """q, k, v and dout of so many rows, with 1 / parts of the heads."""
    random = torch.Generator().manual_seed(0)
    heads = args.heads // parts, args.kv_heads // parts, args.kv_heads // parts, args.heads // parts
    shapes = ((1, rows, each, args.head_dim) for each in heads)
    like = {"dtype": getattr(torch, args.dtype), "device": args.device}
    return tuple(torch.randn(shape, generator=random).to(**like) for shape in shapes)


def trials(args: argparse.Namespace) -> dict[str, list[Callable[[], Times]]]:
    """By name: the one call, and what every rank of a scheme computes."""
    clock = Clock(torch.device(args.device))
    whole, mine = draw(args, args.tokens, args.ranks), draw(args, args.tokens // args.ranks, 1)
    found = {ONE_CALL: [partial(once, clock, partial(torch_attention, causal=True), *whole)]}
    for name, attends in schemes(args, mine[0]).items():
        found[name] = [partial(once, clock, attend, *mine) for attend in attends]
    return found


def schemes(args: argparse.Namespace, q: Tensor) -> dict[str, list[Attend]]:
    """By name: attention of each rank that is to be played.

    Args:
        q: of one rank.
    """
    longest = q.reshape(-1).repeat(args.ranks)  # more than any message
    noise = {dtype: longest.to(dtype) for dtype in {longest.dtype, torch.float32}}
    ranks = range(args.ranks) if args.rank is None else [args.rank]
    found: dict[str, list[Attend]] = {}
    for name, words in named_points(args.ranks).items():
        if not any(part.lower() in name.lower() for part in args.schemes.split(",")):
            continue
        words = {"sequence_parallel_size": args.ranks, **words}
        config = SequenceParallelConfig.from_dict(words)
        comms = (Alone(rank, args.ranks, noise) for rank in ranks)
        found[name] = [partial(SequenceParallel(config, c).attention, causal=True) for c in comms]
    return found


def once(clock: Clock, attend: Attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Times:
    """One forward and one backward."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    start = clock.now()
    out = attend(*leaves)
    middle = clock.now()
    torch.autograd.grad(out, leaves, dout)
    return middle - start, clock.now() - middle


def those_that_run(
    runs: Mapping[str, Sequence[Callable[[], Times]]],
) -> dict[str, Sequence[Callable[[], Times]]]:
    """Those without an error in a first run; of the others the traceback is printed."""
    found: dict[str, Sequence[Callable[[], Times]]] = {}
    for name, several in runs.items():
        try:
            for run in several:
                run()
            found[name] = several
        except RuntimeError:
            traceback.print_exc()
    return found


def take_turns(
    runs: Mapping[str, Sequence[Callable[[], Times]]], repeats: int
) -> list[dict[str, list[Times]]]:
    """Everything once for a warm-up, and then so often, in turns; by name and rank."""
    turns = [
        {name: [run() for run in several] for name, several in runs.items()}
        for _ in range(repeats + 1)
    ]
    return turns[1:]


def line(name: str, turns: Sequence[Mapping[str, Sequence[Times]]]) -> str:
    """A row of the table."""
    ones = [sum(turn[ONE_CALL][0]) for turn in turns]
    ranks = range(len(turns[0][name]))
    took = [[sum(turn[name][rank]) for turn in turns] for rank in ranks]
    beside = [sorted(x / one for x, one in zip(own, ones, strict=True)) for own in took]
    largest = max(ranks, key=lambda rank: median(beside[rank]))
    least = [min(own) / min(ones) for own in took]
    there, back = (median(turn[name][largest][way] for turn in turns) for way in (0, 1))
    middle, first, last = median(beside[largest]), beside[largest][0], beside[largest][-1]
    cells = [f"{there:.4f} s", f"{back:.4f} s", f"{middle:.2f} ({first:.2f} to {last:.2f})"]
    return f"| {' | '.join([name, *cells, f'{max(least):.2f}', f'{mean(least):.2f}'])} |"


if __name__ == "__main__":
    main()
