"""`wallfacer bench`: the best candidates on the running job, predicted beside measured."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from wf_backends.commands import options as o
from wf_backends.commands.plan import plan_words
from wf_backends.placement import placements
from wf_backends.planner import all_plans, legal_degrees
from wf_backends.plans import Plan, Request
from wf_backends.topology import Topology, check_job, load


def bench(
    heads: o.Heads = 8,
    kv_heads: o.KvHeads = 0,
    head_dim: o.HeadDim = 64,
    seqlen: o.Seqlen = 8192,
    batch: o.Batch = 1,
    dtype: o.Dtype = "float32",
    causal: o.Causal = True,
    window: o.Window = -1,
    layout: o.Layout = "zigzag",
    kernel: o.Kernel = "auto",
    topology: Annotated[
        str, typer.Option(help="A preset's name or a file; empty = measured on this job.")
    ] = "",
    cache_dir: o.CacheDir = None,
    top: Annotated[int, typer.Option(help="How many candidates to run.")] = 5,
    repeats: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run the best candidates that a config can name on this job, and the ring beside them.

    Examples:

        mpirun -n 4 wallfacer bench --seqlen 8192

        torchrun --nproc-per-node 4 -m wf_backends.cli bench --topology cluster.json --json
    """
    from wf_backends.cluster import cache_folder, job_hosts, measured
    from wf_backends.comm import make_comm
    from wf_backends.launch import init

    model = o.Model(heads, kv_heads, head_dim, seqlen, batch, dtype, causal, window, layout, kernel)
    workload = replace(model.workload(), kernel="auto")
    launch = init()
    try:
        comm = make_comm()
        hosts = job_hosts(comm, socket.gethostname())
        cluster = (
            check_job(load(topology), hosts)
            if topology
            else measured(comm, hosts, launch.device, cache_dir or cache_folder(os.environ))[0]
        )
        request = Request(cluster, workload, exact_up_to=32)
        plans = with_ring(nameable(request), top)
        rows = track(plans, "running", disable=launch.rank > 0, console=Console(stderr=True))
        times = [run(plan, model, comm, launch.device, repeats) for plan in rows]
    finally:
        launch.close()
    if launch.rank == 0 and as_json:
        words = [
            plan_words(plan, request) | {"measured_s": took}
            for plan, took in zip(plans, times, strict=True)
        ]
        typer.echo(json.dumps({"topology": cluster.to_dict(), "plans": words}, indent=2))
    elif launch.rank == 0:
        Console().print(table(plans, times, cluster))


def nameable(request: Request) -> list[Plan]:
    """The plans that a config can name, their parts played in rank order, fastest first."""
    plans: list[Plan] = []
    for degree in legal_degrees(request):
        every = placements(request.topology.size // degree, directed=False)
        ordered = tuple(placed for placed in every if placed.in_rank_order)
        plans += all_plans(replace(request, degrees=(degree,), forward=ordered, backward=ordered))
    return sorted(plans, key=lambda plan: plan.cost.seconds)


def with_ring(plans: list[Plan], top: int) -> list[Plan]:
    """The first of the plans, and the plain ring to compare with if it is not among them."""
    rings = [plan for plan in plans if plan.degree == 1 and str(plan.forward.placed) == "ring"]
    return plans[:top] + [plan for plan in rings if plan not in plans[:top]]


def run(plan: Plan, model: o.Model, comm: Any, device: Any, repeats: int) -> float:
    """Median seconds of forward and backward of a plan, each until the slowest rank is done."""
    import torch

    from wf_backends import SequenceParallel, SequenceParallelConfig
    from wf_backends.bench_links import Meter

    words = plan.to_config(comm.size, model.layout) | {"kernel": model.kernel}
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
    rows = len(sp.positions(model.seqlen))
    generator = torch.Generator().manual_seed(comm.rank)

    def tensor(heads: int) -> torch.Tensor:
        shape = (model.batch, rows, heads, model.head_dim)
        x = torch.randn(shape, generator=generator)
        return x.to(device, getattr(torch, model.dtype)).requires_grad_()

    q, k, v = (tensor(heads) for heads in (model.heads, *2 * [model.kv_heads or model.heads]))
    dout = torch.randn_like(q)

    def once() -> None:
        out = sp.attention(q, k, v, model.causal, (model.window, -1), seqlen=model.seqlen)
        torch.autograd.grad(out, (q, k, v), dout)

    once()  # plans and buffers are made here
    return median(Meter(comm, device), once, repeats)


def median(meter: Any, work: Callable[[], None], repeats: int) -> float:
    """The median of several times."""
    times = sorted(meter.seconds(work, repeats=1) for _ in range(max(1, repeats)))
    return times[len(times) // 2]


def table(plans: list[Plan], times: list[float], cluster: Topology) -> Table:
    """Predicted beside measured."""
    found = Table(title=f"{cluster.name}: {cluster.size} ranks; forward and backward")
    for name in ("predicted ms", "measured ms", "measured / predicted", "u"):
        found.add_column(name, justify="right")
    for name in ("forward", "backward", "walks"):
        found.add_column(name)
    for plan, took in zip(plans, times, strict=True):
        expected = plan.cost.seconds
        found.add_row(
            f"{1e3 * expected:.4g}",
            f"{1e3 * took:.4g}",
            f"{took / expected:.2f}",
            str(plan.degree),
            str(plan.forward.placed),
            str(plan.backward.placed),
            plan.moves,
        )
    return found
