"""One rank of the lab: measures the cluster, chooses schemes, runs them, and predicts their times.

    benchmarks/lab_hosts.sh 4 2 rank 40mbit python benchmarks/lab_rank.py --out case.json

lab.py starts it for every case, on every rank; rank 0 writes the figures. A step is a forward and a
backward. Schemes take turns. All ranks start a step together, and its time is the slowest rank's.
Bytes are read from the counters of the NIC, and include headers and acknowledgements.

The cluster is measured once before schemes are chosen and once after every round of them.
Predictions use the median of each figure, as the speed of a shared machine varies; predictions from
the first measurement alone are reported, too. If other virtual machines took more than a few per
cent of the cores (steal time in /proc/stat) during a measurement, it is repeated up to twice, and
the one with the least steal time counts.
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
from bytes import random_documents
from lab_report import MAX_STEAL
from lab_schemes import Scheme, make_attention, schemes
from lab_timeline import Timeline, measured_phases, predicted_phases
from measure import cpu_name, gather_values
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
TOLERANCE = 1e-4  # between schemes in float32, relative to the largest value
MAX_TRIES = 3  # of a measurement with too much steal time
EXACT_UP_TO = 64  # ranks; up to here predictions count every message


@dataclass(frozen=True, slots=True)
class Run:
    """One step: seconds of the slowest rank, bytes of the busiest NIC in one direction, phases."""

    seconds: float
    nic_bytes: int
    phases: dict[str, float]
    stolen: float = 0.0
    """Steal time: the share of the cores' time that went to other virtual machines."""


@dataclass(frozen=True, slots=True)
class MeasuredCluster:
    """A topology, and the seconds that its measurement took."""

    topology: Topology
    seconds: float
    stolen: float = 0.0


Timed = TypeVar("Timed", Run, MeasuredCluster)


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    job = launch.init()
    try:
        figures = run_case(args, Timeline(make_comm()))
        if job.rank == 0:
            args.out.write_text(json.dumps(figures, indent=1) + "\n")
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


def run_case(args: argparse.Namespace, comm: Timeline) -> dict[str, Any]:
    """The figures of one case, as JSON."""
    model = Model(args.heads, args.kv_heads, args.head_dim, args.seqlen, dtype="float32")
    workload = with_documents(model.workload(), args.documents)
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    hosts = [f"host {rank // per_host}" for rank in range(comm.size)]
    first = with_least_steal(comm, lambda: measure_cluster(comm, hosts))
    request = Request(first.topology, workload, exact_up_to=EXACT_UP_TO)
    chosen = [schemes(request) if comm.rank == 0 else None]  # rank 0 chooses for all
    dist.broadcast_object_list(chosen, src=0)
    assert chosen[0] is not None
    compared = [scheme for scheme in chosen[0] if not args.only or scheme.name in args.only]
    steps = [make_step(scheme, workload, comm) for scheme in compared]
    check_same_results(comm, steps)
    runs, later = take_turns(comm, steps, hosts, args.repeats)
    clusters = [first, *later]
    topology = median_topology([cluster.topology for cluster in clusters])
    median_request = replace(request, topology=topology)
    return {
        "hosts": int(os.environ["LAB_HOSTS"]),
        "ranks_per_host": per_host,
        "nics": os.environ["LAB_NICS"],
        "rate": os.environ["LAB_RATE"],
        "model": asdict(model),
        "documents": len(workload.mask.cu_seqlens or ()),
        "machine": f"{cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "load": os.getloadavg()[0],
        "topology": topology.to_dict(),
        "topologies": [cluster.topology.to_dict() for cluster in clusters],
        "measured_in_s": max(cluster.seconds for cluster in clusters),
        "schemes": [
            scheme_figures(scheme, price_plan(median_request, scheme.plan.choice), scheme_runs)
            for scheme, scheme_runs in zip(compared, runs, strict=True)
        ],
    }


def with_documents(workload: Workload, median: int) -> Workload:
    """The workload with packed documents of random lengths, if a median is given."""
    if not median:
        return workload
    borders = random_documents(workload.seqlen, median)
    mask = replace(workload.mask, cu_seqlens=borders)
    return replace(workload, mask=mask, layout="document_zigzag")


def with_least_steal(comm: Timeline, work: Callable[[], Timed]) -> Timed:
    """Repeat `work` while steal time is above MAX_STEAL; the result with the least steal time.

    All ranks use the share of the rank that has the largest, so that they decide alike.
    """
    results: list[Timed] = []
    while len(results) < MAX_TRIES and (not results or results[-1].stolen > MAX_STEAL):
        steal_before, total_before = cpu_ticks()
        result = work()
        steal, total = cpu_ticks()
        share = (steal - steal_before) / max(1, total - total_before)
        largest = gather_values(comm, share).max().item()
        results.append(replace(result, stolen=largest))
    return min(results, key=lambda result: result.stolen)


def measure_cluster(comm: Timeline, hosts: list[str]) -> MeasuredCluster:
    """Measure links and kernels as `bench-links` does."""
    start = time.perf_counter()
    topology = measure_topology(comm, hosts, torch.device("cpu"))
    return MeasuredCluster(topology, time.perf_counter() - start)


def median_topology(topologies: list[Topology]) -> Topology:
    """A topology of which every figure is the median of the measured ones."""
    return from_dict(medians([topology.to_dict() for topology in topologies]))


def medians(tables: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every number, in nested tables too; other values are the first table's."""
    result = dict(tables[0])
    for key, value in result.items():
        values = [table[key] for table in tables]
        if isinstance(value, dict):
            result[key] = medians(values)
        elif isinstance(value, int):
            result[key] = median_low(values)
        elif isinstance(value, float):
            result[key] = median(values)
    return result


def cpu_ticks() -> tuple[int, int]:
    """(steal time, total time) of all cores since boot, in ticks."""
    columns = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return int(columns[7]), sum(map(int, columns))


def scheme_figures(scheme: Scheme, median_plan: Plan, runs: list[Run]) -> dict[str, Any]:
    """A scheme's predicted and measured figures, as JSON.

    Args:
        median_plan: its plan, priced on the median topology.
    """
    cost = median_plan.cost
    return {
        "name": scheme.name,
        "plan": scheme.plan_line,
        "predicted_s": cost.seconds,
        "predicted_first_s": scheme.plan.cost.seconds,
        "predicted_compute_s": cost.compute_s,
        "predicted_nic_bytes": cost.nic_bytes,
        "predicted_phases": predicted_phases(median_plan),
        "runs": [asdict(run) for run in runs],
    }


def make_step(scheme: Scheme, workload: Workload, comm: Timeline) -> Step:
    """A step of a scheme; all schemes get the same q, k, v and dout on a rank."""
    sp = make_attention(scheme.plan, workload.layout, comm)
    borders, seqlen = workload.mask.cu_seqlens, workload.seqlen
    shape = workload.shape
    shard = make_layout(workload.layout, comm.size, seqlen, borders)[comm.rank]
    rows = len(positions(shard))
    generator = torch.Generator().manual_seed(comm.rank)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    shapes = [(shape.batch, rows, count, shape.head_dim) for count in heads]
    q, k, v, dout = (torch.randn(size, generator=generator) for size in shapes)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def step() -> tuple[Tensor, ...]:
        out = sp.attention(q, k, v, causal=True, cu_seqlens=borders, seqlen=seqlen)
        return (out.detach(), *torch.autograd.grad(out, inputs, dout))

    return step


def check_same_results(comm: Timeline, steps: list[Step]) -> None:
    """Run every step once, which also makes plans and buffers; compare their results.

    Raises:
        RuntimeError: if they differ by more than float32's rounding.
    """
    first = steps[0]()
    for step in steps[1:]:
        for a, b in zip(first, step(), strict=True):
            error = float((a - b).abs().max() / a.abs().max())
            if not error <= TOLERANCE:  # also if it is NaN
                raise RuntimeError(f"rank {comm.rank}: schemes differ by {error:.1e}")
    sum_over_ranks(comm, torch.zeros(1))


def take_turns(
    comm: Timeline, steps: list[Step], hosts: list[str], repeats: int
) -> tuple[list[list[Run]], list[MeasuredCluster]]:
    """Run all steps in rounds: the runs by step, and the cluster measured after each round."""
    rounds: list[list[Run]] = []
    clusters: list[MeasuredCluster] = []
    for _ in range(repeats):
        rounds.append([with_least_steal(comm, partial(run_step, comm, step)) for step in steps])
        clusters.append(with_least_steal(comm, lambda: measure_cluster(comm, hosts)))
    return [list(runs) for runs in zip(*rounds, strict=True)], clusters


def run_step(comm: Timeline, step: Step) -> Run:
    """One step on all ranks."""
    sum_over_ranks(comm, torch.zeros(1))
    before = nic_counters()
    sum_over_ranks(comm, torch.zeros(1))  # all start together
    comm.start()
    step()
    comm.stop()
    seconds = gather_values(comm, comm.seconds).max().item()
    sent_and_received = [b - a for a, b in zip(before, nic_counters(), strict=True)]
    busiest = gather_values(comm, max(sent_and_received)).max().item()
    return Run(seconds, int(busiest), measured_phases(comm))


def nic_counters() -> tuple[int, int]:
    """Bytes that this rank's NIC has sent, and received."""
    folder = Path("/sys/class/net/eth0/statistics")
    sent = (folder / "tx_bytes").read_text()
    received = (folder / "rx_bytes").read_text()
    return int(sent), int(received)


if __name__ == "__main__":
    main()
