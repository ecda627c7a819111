"""Compare our schemes with those of other packages: the same causal attention, in one run.

    pip install ".[deepspeed,bench]"
    torchrun --nproc-per-node 4 benchmarks/peers.py
    torchrun --nproc-per-node 4 benchmarks/peers.py --tokens 8192 --only ours,DeepSpeed,torch
    torchrun --nproc-per-node 4 benchmarks/peers.py --dtype bfloat16

The planner's choice and our named schemes on one host (5 minutes each on an idle machine; the last
line compares "auto" with the best of them):

    torchrun --nproc-per-node 4 benchmarks/peers.py --tokens 8192 --only ours --repeats 15
    torchrun --nproc-per-node 4 benchmarks/peers.py --tokens 8192 --only ours --repeats 15 \\
        --kv-heads 2

One attention call, forward + backward, float32, gloo on CPUs, one thread per rank. All schemes get
the same q, k, v and dout, and take turns. A scheme that is not installed or fails is listed below
the table with its error. Two packages import flash-attn; if it is not installed, this benchmark
uses a stand-in on torch's CPU operator (flash_attn_stand_in/).
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

import peer_trial
import torch
from measure import cores_and_load, cpu_name, table_head, table_row
from peer_adapters import ADAPTERS, STAND_IN, MakeScheme, Setup, add_flash_attn_stand_in, schemes_of
from peer_trial import Figures, Heads, Inputs, RefusedError, Run

from wf_backends import launch

AUTO = "ours: auto"
MAX_EPS = 30  # larger relative errors, in eps of the dtype, are printed in bold


@dataclass(frozen=True, slots=True)
class Row:
    """A scheme that ran, and its relative errors of out, dq, dk and dv."""

    run: Run
    errors: tuple[float, ...]


def main() -> None:
    """Measure every scheme that runs, and print the table."""
    args = parse()
    torch.set_num_threads(1)
    add_flash_attn_stand_in()
    job = launch.init("gloo", timeout=120)
    try:
        compare(args, job)
    finally:
        job.close()  # after the last use of the groups: their threads end here


def compare(args: argparse.Namespace, job: launch.Launch) -> None:
    """The whole benchmark on one rank."""
    head = heading(args, job.world_size)  # first, as it reads the load of the machine
    setup = Setup(job.rank, job.world_size, args.tokens)
    heads = Heads(args.heads, args.kv_heads or args.heads, args.head_dim)
    inputs = Inputs.draw(setup, heads, getattr(torch, args.dtype))
    rows, refused = prepare(setup, inputs, args.only.split(","))
    baselines = [peer_trial.one_process(inputs, setup, alone) for alone in (True, False)]
    peer_trial.measure(baselines, 1)  # warm-up; the schemes have run in `prepare`
    figures = peer_trial.measure([*baselines, *(row.run for row in rows)], args.repeats)
    if setup.rank == 0:
        text = "\n".join([*head, *table(setup, inputs, rows, figures), *refused])
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


def prepare(setup: Setup, inputs: Inputs, packages: list[str]) -> tuple[list[Row], list[str]]:
    """Make and run every scheme once: the rows that ran, and a line for each that failed."""
    rows: list[Row] = []
    refused: list[str] = []
    for package in packages:
        try:
            schemes = peer_trial.on_all_ranks(partial(schemes_of, package, setup))
        except RefusedError as error:
            refused.append(f"- {package}: {error}")
            continue
        for name, make in schemes.items():
            try:
                rows.append(first_run(f"{package}: {name}", make, inputs))
            except RefusedError as error:
                refused.append(f"- {package}, {name}: {error}")
    return rows, ["", "Did not run:", "", *refused] if refused else []


def first_run(name: str, make: MakeScheme, inputs: Inputs) -> Row:
    """Run a scheme once, as a warm-up, and compare it with the reference.

    After each stage the ranks agree that all have succeeded: none waits in a collective for a rank
    that has failed.
    """
    scheme = peer_trial.on_all_ranks(make)
    run = peer_trial.make_run(name, scheme, inputs)
    results = peer_trial.on_all_ranks(run.step)
    return Row(
        run,
        peer_trial.on_all_ranks(
            partial(peer_trial.relative_errors, results, inputs, scheme.positions)
        ),
    )


def heading(args: argparse.Namespace, num_ranks: int) -> list[str]:
    """Lines with the command, the machine and the versions."""
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


def table(setup: Setup, inputs: Inputs, rows: list[Row], figures: list[list[Figures]]) -> list[str]:
    """The time of one process, then one line per scheme."""
    alone = median(max(repeat.cpu) for repeat in figures[0])
    busy = median(mean(repeat.cpu) for repeat in figures[1])
    lines = [
        f"torch's attention of the whole sequence in one process: {alone:.3f} s of CPU time while "
        f"the other ranks wait, {busy:.3f} s while all ranks do the same.",
        "`x ideal`: CPU time of the rank with the largest median over that time / the number of "
        "ranks. Median and, in brackets, least to most of its repeats.",
        "A unit is one rank's Q; units sent are the TCP payload that the kernel counted, mean and "
        "largest rank; beside it what the scheme says itself.",
        f"Errors are relative norms beside float64, bold beyond {MAX_EPS} roundings of the dtype.",
        "",
    ]
    head = ("scheme", "x ideal, alone", "x ideal, busy", "CPU s", "wall s")
    head += ("units sent, mean / largest", "own count, largest", "error out / dq / dk / dv")
    lines.append(table_head(*head))
    ideals = [alone / setup.size, busy / setup.size]
    cpu_s: dict[str, float] = {}
    for row, repeats in zip(rows, figures[2:], strict=True):
        lines.append(line(row, repeats, ideals, inputs))
        cpu_s[row.run.name] = median(busiest(repeats))
    return lines + compare_auto(cpu_s)


def line(row: Row, repeats: list[Figures], ideals: list[float], inputs: Inputs) -> str:
    """A row of the table."""
    unit = inputs.q.nbytes / len(repeats[0].cpu)
    cpu = busiest(repeats)
    wall = [max(repeat.wall) for repeat in repeats]
    sent, reported = repeats[-1].sent, max(repeats[-1].reported)
    alone, busy = ([seconds / ideal for seconds in cpu] for ideal in ideals)
    cells = [row.run.name, spread(alone), f"{median(busy):.2f}", f"{median(cpu):.3f}", spread(wall)]
    cells += [f"{mean(sent) / unit:.2f} / {max(sent) / unit:.2f}"]
    cells += [f"{reported / unit:.2f}" if reported else "-"]
    cells += [" / ".join(format_error(error, inputs.q.dtype) for error in row.errors)]
    return table_row(*cells)


def busiest(repeats: list[Figures]) -> tuple[float, ...]:
    """CPU seconds of each repeat on the rank with the largest median."""
    return max(zip(*(repeat.cpu for repeat in repeats), strict=True), key=median)


def compare_auto(cpu_s: dict[str, float]) -> list[str]:
    """A line that compares the planner's choice with the best of our named schemes."""
    auto = cpu_s.pop(AUTO, None)
    ours = {name: seconds for name, seconds in cpu_s.items() if name.startswith("ours: ")}
    if auto is None or not ours:
        return []
    best = min(ours, key=ours.__getitem__)
    return [
        "",
        f"`{AUTO}` takes {auto / ours[best]:.2f} x the CPU time of the best of ours, {best}.",
    ]


def spread(values: Sequence[float]) -> str:
    """Median (minimum to maximum)."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def format_error(error: float, dtype: torch.dtype) -> str:
    """In bold if it is larger than rounding errors, or nan."""
    rounding = error < MAX_EPS * torch.finfo(dtype).eps
    return f"{error:.0e}" if rounding else f"**{error:.0e}**"


if __name__ == "__main__":
    main()
