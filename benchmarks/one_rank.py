"""Time what one rank of many computes, relative to one attention call with the same FLOPs.

There is no network and no other rank: received rows are copies of random rows. So the times are of
kernels, merges and copies, without waiting. The one call is torch's attention of the whole sequence
with 1 / ranks of the heads.

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
from measure import cores_and_load, cpu_name, print_head, print_row
from torch import Tensor

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm.protocol import Communicator, Message, Pending

Times = tuple[float, float]  # seconds of a forward, of a backward
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
ONE_CALL = "one call"


class Arrived:
    """The pending object of messages that have arrived already."""

    def wait(self) -> None: ...

    def poll(self) -> None: ...


class Alone(Communicator):
    """A rank without peers: it receives its own headers, and rows that are copies of `noise`.

    Args:
        noise: by dtype of the messages, a finite 1-d tensor that is longer than any message.
    """

    def __init__(self, rank: int, size: int, noise: Mapping[torch.dtype, Tensor]) -> None:
        super().__init__(rank, size)
        self.noise = noise
        self.on_host = all(x.device.type == "cpu" for x in noise.values())

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        headers = {(x.shape, x.dtype): x for _, x in sends if not x.is_floating_point()}
        for _, x in recvs:
            if x.is_floating_point():
                x.copy_(self.noise[x.dtype][: x.numel()].view(x.shape))
            else:
                x.copy_(headers[x.shape, x.dtype])
        return Arrived()


class Clock:
    """CPU time on a CPU, wall time after a synchronization on a GPU; in seconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()


def main() -> None:
    """Print the machine, the arguments of the call, and a line per scheme."""
    args = parse()
    torch.set_num_threads(1)
    print(heading(args))
    ratios = ("x, median (least to most)", "x, least", "mean of ranks")
    print_head("scheme", "forward", "backward", *ratios)
    turns = take_turns(without_failures(make_runs(args)), args.repeats)
    for name in turns[0]:
        print_row(name, *cells(name, turns))


def heading(args: argparse.Namespace) -> str:
    """A line with the arguments and the machine."""
    cuda = args.device == "cuda"
    device = torch.cuda.get_device_name() if cuda else f"{cpu_name()}, one thread"
    return (
        f"torch {torch.__version__}, {device}, {cores_and_load()} before. One of {args.ranks} "
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
    parser.add_argument("--rank", type=int, help="the rank to play; all in turn if not given")
    args = parser.parse_args()
    if args.heads % args.ranks or args.kv_heads % args.ranks or args.tokens % (2 * args.ranks):
        parser.error("--ranks must divide --heads and --kv-heads, and twice of it --tokens")
    return args


def draw(args: argparse.Namespace, rows: int, parts: int) -> tuple[Tensor, ...]:
    """q, k, v and dout (1, rows, heads / parts, head_dim) on the device."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads = args.heads // parts, args.kv_heads // parts
    shapes = ((1, rows, n, args.head_dim) for n in (heads, kv_heads, kv_heads, heads))
    options = {"dtype": getattr(torch, args.dtype), "device": args.device}
    return tuple(torch.randn(shape, generator=generator).to(**options) for shape in shapes)


def make_runs(args: argparse.Namespace) -> dict[str, list[Callable[[], Times]]]:
    """Runs by name: the one call, and for each scheme a run per rank."""
    clock = Clock(torch.device(args.device))
    whole = draw(args, args.tokens, args.ranks)
    local = draw(args, args.tokens // args.ranks, 1)
    one_call = partial(torch_attention, causal=True)
    runs = {ONE_CALL: [partial(time_once, clock, one_call, *whole)]}
    for name, attends in schemes(args, local[0]).items():
        runs[name] = [partial(time_once, clock, attend, *local) for attend in attends]
    return runs


def schemes(args: argparse.Namespace, q: Tensor) -> dict[str, list[Attend]]:
    """Attention functions by name of the scheme: one per rank.

    Args:
        q: of one rank, for the size and dtype of messages.
    """
    rows = q.reshape(-1).repeat(args.ranks)  # longer than any message
    noise = {dtype: rows.to(dtype) for dtype in {rows.dtype, torch.float32}}
    ranks = range(args.ranks) if args.rank is None else [args.rank]
    attends: dict[str, list[Attend]] = {}
    for name, options in named_points(args.ranks).items():
        if not any(part.lower() in name.lower() for part in args.schemes.split(",")):
            continue
        options = {"sequence_parallel_size": args.ranks, **options}
        config = SequenceParallelConfig.from_dict(options)
        comms = (Alone(rank, args.ranks, noise) for rank in ranks)
        attends[name] = [
            partial(SequenceParallel(config, comm).attention, causal=True) for comm in comms
        ]
    return attends


def time_once(clock: Clock, attend: Attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Times:
    """Time one forward and one backward."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    start = clock.now()
    out = attend(*leaves)
    middle = clock.now()
    torch.autograd.grad(out, leaves, dout)
    return middle - start, clock.now() - middle


def without_failures(
    runs: Mapping[str, Sequence[Callable[[], Times]]],
) -> dict[str, Sequence[Callable[[], Times]]]:
    """The runs that succeed once; prints the tracebacks of the others."""
    succeeded: dict[str, Sequence[Callable[[], Times]]] = {}
    for name, runs_of_ranks in runs.items():
        try:
            for run in runs_of_ranks:
                run()
            succeeded[name] = runs_of_ranks
        except RuntimeError:
            traceback.print_exc()
    return succeeded


def take_turns(
    runs: Mapping[str, Sequence[Callable[[], Times]]], repeats: int
) -> list[dict[str, list[Times]]]:
    """The times of each turn, by name and rank: all runs once per turn, after a warm-up."""
    turns = [
        {name: [run() for run in runs_of_ranks] for name, runs_of_ranks in runs.items()}
        for _ in range(repeats + 1)
    ]
    return turns[1:]


def cells(name: str, turns: Sequence[Mapping[str, Sequence[Times]]]) -> list[str]:
    """The cells of a scheme, without its name."""
    one_call = [sum(turn[ONE_CALL][0]) for turn in turns]  # seconds of each turn
    ranks = range(len(turns[0][name]))
    seconds = [[sum(turn[name][rank]) for turn in turns] for rank in ranks]
    ratios = [[a / b for a, b in zip(of_rank, one_call, strict=True)] for of_rank in seconds]
    slowest = max(ranks, key=lambda rank: median(ratios[rank]))
    best_ratios = [min(of_rank) / min(one_call) for of_rank in seconds]
    forward = median(turn[name][slowest][0] for turn in turns)
    backward = median(turn[name][slowest][1] for turn in turns)
    low, middle, high = min(ratios[slowest]), median(ratios[slowest]), max(ratios[slowest])
    times = [f"{forward:.4f} s", f"{backward:.4f} s", f"{middle:.2f} ({low:.2f} to {high:.2f})"]
    return [*times, f"{max(best_ratios):.2f}", f"{mean(best_ratios):.2f}"]


if __name__ == "__main__":
    main()
