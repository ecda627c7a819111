"""One rank of the lab: measure the cluster, choose schemes, run them, predict them.

    benchmarks/lab_hosts.sh 4 2 rank 40mbit python benchmarks/lab_rank.py --out case.json

Every rank runs it; rank 0 writes the figures. lab.py starts it for every case. A step is a forward
and a backward. Schemes take turns, all ranks start a step together, and its time is the slowest
rank's. Bytes are those of the NIC's own counters, headers and acknowledgements included.

The cluster is measured once before schemes are chosen and once after every round of them. A machine
that is shared has good and bad minutes: each field's median is what predictions go by, and those
by the first alone stand beside them. What ran while others took more than a few per cent of the
cores runs again, up to twice, and the calmest counts: so says /proc/stat, whatever was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, median_low
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from bytes import drawn_documents
from lab_report import CALM
from lab_schemes import Scheme, attention_of, schemes
from lab_timeline import Timeline, phases, predicted
from measure import cpu_name, everyones
from torch import Tensor

from wf_backends import launch
from wf_backends.cli.options import Model
from wf_backends.cluster.measure import measure_topology
from wf_backends.cluster.topology import Topology, from_dict
from wf_backends.comm import make_comm, sum_over_ranks
from wf_backends.cost.workload import Workload
from wf_backends.planner.plan import Plan, Request
from wf_backends.planner.search import price_plan
from wf_backends.runtime.shards import positions
from wf_backends.schedule.layout import make_layout

Step = Callable[[], tuple[Tensor, ...]]  # returns out, dq, dk, dv of this rank's rows
TOLERANCE = 1e-4  # of float32, relative to the largest value
TRIES = 3  # of what was not calm
COUNTED = 64  # ranks up to which every prediction counts every message


@dataclass(frozen=True, slots=True)
class Run:
    """One step: the slowest rank's seconds, the busiest NIC's bytes one way, seconds by phase."""

    seconds: float
    nic_bytes: int
    phases: dict[str, float]
    stolen: float = 0.0
    """The share of the cores' time that others had meanwhile."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A topology, and the seconds that measuring it took."""

    topology: Topology
    seconds: float
    stolen: float = 0.0


Timed = TypeVar("Timed", Run, Measured)


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    job = launch.init()
    try:
        found = case(args, Timeline(make_comm()))
        if job.rank == 0:
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        job.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=0, help="0 = as many as heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=0, help="median tokens; 0 = one document")
    parser.add_argument("--repeats", type=int, default=3, help="after one that is not counted")
    parser.add_argument("--only", nargs="*", help="names of schemes; all if none is given")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file that rank 0 writes")
    return parser.parse_args()


def case(args: argparse.Namespace, comm: Timeline) -> dict[str, Any]:
    """The figures of one case, as JSON."""
    model = Model(args.heads, args.kv_heads, args.head_dim, args.seqlen, dtype="float32")
    workload = packed(model.workload(), args.documents)
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    hosts = [f"host {rank // per_host}" for rank in range(comm.size)]
    first = calmest(comm, lambda: measured(comm, hosts))
    request = Request(first.topology, workload, exact_up_to=COUNTED)
    found = [schemes(request) if comm.rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    assert found[0] is not None
    compared = [s for s in found[0] if not args.only or s.name in args.only]
    steps = [step_of(scheme, workload, comm) for scheme in compared]
    check_same(comm, steps)
    runs, others = take_turns(comm, steps, hosts, args.repeats)
    clusters = [first, *others]
    cluster = middle([one.topology for one in clusters])
    by_middle = replace(request, topology=cluster)
    return {
        "hosts": int(os.environ["LAB_HOSTS"]),
        "ranks_per_host": per_host,
        "nics": os.environ["LAB_NICS"],
        "rate": os.environ["LAB_RATE"],
        "model": asdict(model),
        "documents": len(workload.mask.cu_seqlens or ()),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "load": os.getloadavg()[0],
        "topology": cluster.to_dict(),
        "topologies": [one.topology.to_dict() for one in clusters],
        "measured_in_s": max(one.seconds for one in clusters),
        "schemes": [
            figures(scheme, price_plan(by_middle, scheme.plan.choice), ran)
            for scheme, ran in zip(compared, runs, strict=True)
        ],
    }


def packed(workload: Workload, median: int) -> Workload:
    """The workload, cut into documents of drawn lengths if their median is given."""
    if not median:
        return workload
    borders = drawn_documents(workload.seqlen, median)
    mask = replace(workload.mask, cu_seqlens=borders)
    return replace(workload, mask=mask, layout="document_zigzag")


def calmest(comm: Timeline, work: Callable[[], Timed]) -> Timed:
    """What `work` gives, done again where it was not calm; the calmest, on all ranks the same."""
    found: list[Timed] = []
    while len(found) < TRIES and (not found or found[-1].stolen > CALM):
        before = ticks()
        made = work()
        taken, all_ticks = (now - then for now, then in zip(ticks(), before, strict=True))
        share = everyones(comm, taken / max(1, all_ticks)).max().item()
        found.append(replace(made, stolen=share))
    return min(found, key=lambda one: one.stolen)


def measured(comm: Timeline, hosts: list[str]) -> Measured:
    """The cluster as `bench-links` finds it."""
    start = time.perf_counter()
    cluster = measure_topology(comm, hosts, torch.device("cpu"))
    return Measured(cluster, time.perf_counter() - start)


def middle(clusters: list[Topology]) -> Topology:
    """The median of every figure."""
    return from_dict(medians([cluster.to_dict() for cluster in clusters]))


def medians(words: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every number, in tables too; anything else as the first has it."""
    found = dict(words[0])
    for key, value in found.items():
        values = [one[key] for one in words]
        if isinstance(value, dict):
            found[key] = medians(values)
        elif isinstance(value, int):
            found[key] = median_low(values)
        elif isinstance(value, float):
            found[key] = median(values)
    return found


def ticks() -> tuple[int, int]:
    """(what other machines had of these cores since they started, all), in ticks."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return int(words[7]), sum(map(int, words))


def figures(scheme: Scheme, by_middle: Plan, runs: list[Run]) -> dict[str, Any]:
    """A scheme's predicted and measured figures, as JSON.

    Args:
        by_middle: its plan, priced by the median of what was measured.
    """
    cost = by_middle.cost
    return {
        "name": scheme.name,
        "plan": scheme.words,
        "predicted_s": cost.seconds,
        "predicted_first_s": scheme.plan.cost.seconds,
        "predicted_compute_s": cost.compute_s,
        "predicted_nic_bytes": cost.nic_bytes,
        "predicted_phases": predicted(by_middle),
        "runs": [asdict(run) for run in runs],
    }


def step_of(scheme: Scheme, workload: Workload, comm: Timeline) -> Step:
    """A forward and a backward on rows that are the same in every scheme."""
    sp = attention_of(scheme.plan, workload.layout, comm)
    borders, seqlen, shape = workload.mask.cu_seqlens, workload.seqlen, workload.shape
    rows = len(positions(make_layout(workload.layout, comm.size, seqlen, borders)[comm.rank]))
    generator = torch.Generator().manual_seed(comm.rank)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    shapes = [(shape.batch, rows, count, shape.head_dim) for count in heads]
    q, k, v, dout = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def step() -> tuple[Tensor, ...]:
        out = sp.attention(q, k, v, causal=True, cu_seqlens=borders, seqlen=seqlen)
        return (out.detach(), *torch.autograd.grad(out, inputs, dout))

    return step


def check_same(comm: Timeline, steps: list[Step]) -> None:
    """Run every step once, which also makes plans and buffers; all must give the same.

    Raises:
        RuntimeError: if they differ by more than float32's rounding.
    """
    first = steps[0]()
    for step in steps[1:]:
        for a, b in zip(first, step(), strict=True):
            off = float((a - b).abs().max() / a.abs().max())
            if off > TOLERANCE:
                raise RuntimeError(f"rank {comm.rank}: schemes differ by {off:.1e}")
    sum_over_ranks(comm, torch.zeros(1))


def take_turns(
    comm: Timeline, steps: list[Step], hosts: list[str], repeats: int
) -> tuple[list[list[Run]], list[Measured]]:
    """Runs of every step, a round of all of them at a time, and the cluster after each round."""
    rounds, clusters = list[list[Run]](), list[Measured]()
    for _ in range(repeats):
        rounds.append([calmest(comm, partial(run, comm, step)) for step in steps])
        clusters.append(calmest(comm, lambda: measured(comm, hosts)))
    return [list(several) for several in zip(*rounds, strict=True)], clusters


def run(comm: Timeline, step: Step) -> Run:
    """One step on all ranks."""
    sum_over_ranks(comm, torch.zeros(1))
    before = nic_counters()
    sum_over_ranks(comm, torch.zeros(1))  # all start together
    comm.start()
    step()
    comm.stop()
    seconds = everyones(comm, comm.seconds).max().item()
    moved = [after - at for after, at in zip(nic_counters(), before, strict=True)]
    busiest = everyones(comm, max(moved)).max().item()
    return Run(seconds, int(busiest), phases(comm))


def nic_counters() -> tuple[int, int]:
    """Bytes that this rank's NIC has sent, and received."""
    folder = Path("/sys/class/net/eth0/statistics")
    sent, received = ((folder / f"{way}_bytes").read_text() for way in ("tx", "rx"))
    return int(sent), int(received)


if __name__ == "__main__":
    main()
