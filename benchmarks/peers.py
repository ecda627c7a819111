"""Our schemes beside other packages', the same causal attention in the same processes, in one run.

    pip install ".[deepspeed,bench]"
    torchrun --nproc-per-node 4 benchmarks/peers.py
    torchrun --nproc-per-node 4 benchmarks/peers.py --tokens 8192 --only ours,DeepSpeed,torch
    torchrun --nproc-per-node 4 benchmarks/peers.py --dtype bfloat16

The planner's choice beside our schemes that have a name, on one host (5 minutes each at rest; the
last line says how far "auto" is behind the best of them):

    torchrun --nproc-per-node 4 benchmarks/peers.py --tokens 8192 --only ours --repeats 15
    torchrun --nproc-per-node 4 benchmarks/peers.py --tokens 8192 --only ours --repeats 15 \\
        --kv-heads 2

One attention call, forward + backward, float32, gloo on CPUs, one thread a rank. Every scheme gets
the same q, k, v, dout, and they take turns. What is not installed or does not run is named below
the table with its error. flash-attn, which two packages import, has a stand-in on torch's CPU
operator (flash_attn_stand_in/) where it is not installed; it is lent to this benchmark alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import mean, median

import torch
from measure import cores_and_load, cpu_name
from peer_adapters import ADAPTERS, STAND_IN, Make, Place, lend_flash_attn, schemes_of
from peer_trial import (
    Figures,
    Heads,
    RefusedError,
    Run,
    Work,
    agree,
    errors_of,
    measure,
    one_process,
    run_of,
)

from wf_backends import launch

AUTO = "ours: auto"
WRONG = 30  # times the rounding of the dtype


@dataclass(frozen=True, slots=True)
class Row:
    """A scheme that ran, and how wrong it was: out, dq, dk, dv."""

    run: Run
    errors: tuple[float, ...]


def main() -> None:
    """Measure every scheme that runs, and print the table."""
    args = parse()
    torch.set_num_threads(1)
    lend_flash_attn()
    job = launch.init("gloo", timeout=120)
    try:
        compare(args, job)
    finally:
        job.close()  # when nothing refers to the groups any more, so that their threads end here


def compare(args: argparse.Namespace, job: launch.Launch) -> None:
    """The whole benchmark on one rank."""
    head = heading(args, job.world_size)  # now, for the load that there is without us
    place = Place(job.rank, job.world_size, args.tokens)
    heads = Heads(args.heads, args.kv_heads or args.heads, args.head_dim)
    work = Work.draw(place, heads, getattr(torch, args.dtype))
    rows, refused = prepare(place, work, args.only.split(","))
    baselines = [one_process(work, place, alone) for alone in (True, False)]
    measure(baselines, 1)  # a warm-up; the schemes have had theirs
    figures = measure([*baselines, *(row.run for row in rows)], args.repeats)
    if place.rank == 0:
        text = "\n".join([*head, *table(place, work, rows, figures), *refused])
        print(text)
        if args.out:
            with args.out.open("a") as file:
                file.write(text + "\n\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=0, help="0 = as many as heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--repeats", type=int, default=5, help="after a warm-up")
    parser.add_argument("--only", default=",".join(ADAPTERS), help="packages, of %(default)s")
    parser.add_argument("--out", type=Path, help="append the table to this file too")
    args = parser.parse_args()
    unknown = sorted(set(args.only.split(",")) - set(ADAPTERS))
    if unknown:
        parser.error(f"--only takes {', '.join(ADAPTERS)}, separated by commas, got {unknown}")
    return args


def prepare(place: Place, work: Work, packages: list[str]) -> tuple[list[Row], list[str]]:
    """Make and run every scheme once; the rows that ran, and a line for each that did not."""
    rows: list[Row] = []
    refused: list[str] = []
    for package in packages:
        try:
            for name, make in agree(partial(schemes_of, package, place)).items():
                try:
                    rows.append(first_run(f"{package}: {name}", make, work))
                except RefusedError as error:
                    refused.append(f"- {package}, {name}: {error}")
        except RefusedError as error:
            refused.append(f"- {package}: {error}")
    return rows, ["", "Did not run:", "", *refused] if refused else []


def first_run(name: str, make: Make, work: Work) -> Row:
    """Warm up, and compare with the reference; ranks agree before they meet in a collective."""
    scheme = agree(make)
    run = run_of(name, scheme, work)
    found = agree(run.step)
    return Row(run, agree(partial(errors_of, found, work, scheme.positions)))


def heading(args: argparse.Namespace, num_ranks: int) -> list[str]:
    """The command, the machine and the versions."""
    flash = "the stand-in" if str(STAND_IN) in sys.path else version("flash-attn")
    names = ("deepspeed", "yunchang", "ring-flash-attn", "ring-attention-pytorch", "transformers")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    command = f"torchrun --nproc-per-node {num_ranks} benchmarks/peers.py --tokens {args.tokens}"
    command += "" if args.only == ",".join(ADAPTERS) else f" --only {args.only}"
    command += "" if args.dtype == "float32" else f" --dtype {args.dtype}"
    command += f" --kv-heads {args.kv_heads}" if args.kv_heads else ""
    for_keys = f" ({args.kv_heads} for keys)" if args.kv_heads else ""
    return [
        f"`{command}`: torch {torch.__version__}, {cpu_name()}, {cores_and_load()} before; "
        f"{num_ranks} ranks, gloo, one thread a rank.",
        f"{versions}; flash_attn is {flash}. Causal, {args.heads} heads of {args.head_dim}"
        f"{for_keys}, {args.dtype}, {args.tokens} tokens, forward + backward; {args.repeats} "
        f"repeats in turns.",
        "",
    ]


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def table(place: Place, work: Work, rows: list[Row], figures: list[list[Figures]]) -> list[str]:
    """What one process takes, then one line per scheme."""
    alone = median(max(one.cpu) for one in figures[0])
    busy = median(mean(one.cpu) for one in figures[1])
    lines = [
        f"torch's attention of the whole sequence in one process: {alone:.3f} s of CPU time while "
        f"the other ranks wait, {busy:.3f} s while all ranks do the same.",
        "`x ideal`: CPU time of the rank with the largest median over that time / the number of "
        "ranks. Median and, in brackets, least to most of its repeats.",
        "A unit is one rank's Q; units sent are the TCP payload that the kernel counted, mean and "
        "largest rank; beside it what the scheme says itself.",
        f"Errors are relative norms beside float64, bold beyond {WRONG} roundings of the dtype.",
        "",
        "| scheme | x ideal, alone | x ideal, busy | CPU s | wall s | units sent, mean / largest "
        "| own count, largest | error out / dq / dk / dv |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ideals = [alone / place.size, busy / place.size]
    found = list(zip(rows, figures[2:], strict=True))
    lines += [line(row, of_row, ideals, work) for row, of_row in found]
    cpu = {row.run.name: busiest(of_row) for row, of_row in found}
    return lines + beside_auto({name: median(spent) for name, spent in cpu.items()})


def line(row: Row, found: list[Figures], ideals: list[float], work: Work) -> str:
    """A row of the table."""
    unit = work.q.nbytes / len(found[0].cpu)
    cpu, wall = busiest(found), [max(one.wall) for one in found]
    sent, own = found[-1].sent, max(found[-1].reported)
    alone, busy = ([seconds / ideal for seconds in cpu] for ideal in ideals)
    cells = [row.run.name, spread(alone), f"{median(busy):.2f}", f"{median(cpu):.3f}", spread(wall)]
    cells += [f"{mean(sent) / unit:.2f} / {max(sent) / unit:.2f}"]
    cells += [f"{own / unit:.2f}" if own else "-"]
    cells += [" / ".join(shown(error, work.q.dtype) for error in row.errors)]
    return f"| {' | '.join(cells)} |"


def busiest(found: list[Figures]) -> tuple[float, ...]:
    """CPU seconds of each repeat, of the rank with the largest median."""
    return max(zip(*(one.cpu for one in found), strict=True), key=median)


def beside_auto(cpu_s: dict[str, float]) -> list[str]:
    """How far the planner's choice is behind the best of our schemes that a user could name."""
    auto = cpu_s.pop(AUTO, None)
    ours = {name: spent for name, spent in cpu_s.items() if name.startswith("ours: ")}
    if auto is None or not ours:
        return []
    best = min(ours, key=ours.__getitem__)
    return [
        "",
        f"`{AUTO}` takes {auto / ours[best]:.2f} x the CPU time of the best of ours, {best}.",
    ]


def spread(values: Sequence[float]) -> str:
    """Median (least to most)."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def shown(error: float, dtype: torch.dtype) -> str:
    """In bold where it is no rounding error."""
    wrong = not error < WRONG * torch.finfo(dtype).eps
    return f"**{error:.0e}**" if wrong else f"{error:.0e}"


if __name__ == "__main__":
    main()
