"""`wallfacer bench`: the best candidates on the running job, predicted beside measured."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from wf_backends.commands import options as o
from wf_backends.commands.plan import block, config, plan_words
from wf_backends.launched import check_job
from wf_backends.placement import in_rank_order
from wf_backends.planner import all_plans, check_memory, price_plan
from wf_backends.plans import Plan, Request
from wf_backends.presets import PRESETS, load
from wf_backends.topology import Topology
from wf_backends.words import AUTO

if TYPE_CHECKING:
    from wf_backends.launch import Launch

EXACT_UP_TO = 16  # ranks; beyond, pricing every candidate message by message takes long


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
    layers: o.Layers = 0,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace of every candidate here: .json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run the best candidates on this job, and the plain ring beside them.

    Examples:

        mpirun -n 4 wallfacer bench --seqlen 8192

        torchrun --nproc-per-node 4 -m wf_backends.cli bench --topology cluster.json --json

        mpirun -n 4 wallfacer bench --top 2 --trace trace.json
    """
    from wf_backends.launch import init

    if trace is not None and trace.suffix != ".json":
        raise ValueError(f"--trace must end in .json, got {str(trace)!r}")
    o.check_folder("--trace", trace)
    for option, value in (("--top", top), ("--repeats", repeats)):
        o.check_least(option, value, 1)
    model = o.Model(heads, kv_heads, head_dim, seqlen, batch, dtype, causal, window, layout, kernel)
    workload = model.workload()
    launch = init()
    try:
        job = Job(launch, cache_dir)
        request = Request(
            job.cluster(topology), workload, exact_up_to=EXACT_UP_TO, **o.keeping(layers)
        )
        plans = with_ring(all_plans(priced(request)), priced(request), top)
        times = job.run(plans, model, repeats)
        if trace is not None:
            job.trace(plans, model, trace)
    finally:
        launch.close()
    if launch.rank == 0:
        show(plans, times, request, as_json)


class Job:
    """The running job: its ranks and hosts, and its topology once that is asked for."""

    def __init__(self, launch: Launch, cache_dir: Path | None) -> None:
        from wf_backends.cluster import cache_folder, job_hosts
        from wf_backends.comm import make_comm

        self.device, self.comm = launch.device, make_comm()
        self.hosts = job_hosts(self.comm, socket.gethostname())
        self.folder = cache_dir or cache_folder(os.environ)

    def cluster(self, source: str) -> Topology:
        """The topology that is named, if it describes the job; without a name, measured.

        A preset has as many ranks as the job; a file says itself how many.
        """
        from wf_backends.cluster import measured

        if source:
            size = self.comm.size
            named = o.cluster(source, size) if source in PRESETS else load(source)
            return check_job(named, self.hosts)
        return measured(self.comm, self.hosts, self.device, self.folder)[0]

    def run(self, plans: list[Plan], model: o.Model, repeats: int) -> list[float]:
        """Median seconds of each plan."""
        shown = Console(stderr=True)
        rows = track(plans, "running", disable=self.comm.rank > 0, console=shown)
        return [self._median(self.work(plan, model), repeats) for plan in rows]

    def work(self, plan: Plan, model: o.Model) -> Callable[[], None]:
        """Forward and backward of a plan, done once already: plans and buffers are there."""
        work = prepare(plan, model, self.comm, self.device)
        work()
        return work

    def trace(self, plans: list[Plan], model: o.Model, path: Path) -> None:
        """Write what every rank does in one run of each plan, beside what is predicted."""
        from wf_backends.commands.trace import from_all_ranks, record, write

        spans = [from_all_ranks(record(self.work(plan, model))) for plan in plans]
        if self.comm.rank == 0:
            write(path, plans, spans)

    def _median(self, work: Callable[[], None], repeats: int) -> float:
        """The median of several times, each until the slowest rank is done."""
        from wf_backends.bench_links import Meter

        return median(Meter(self.comm, self.device).times(work, repeats))


def show(plans: list[Plan], times: list[float], request: Request, as_json: bool) -> None:
    """Predicted beside measured, and the config of what was fastest."""
    both = list(zip(plans, times, strict=True))
    fastest, _ = min(both, key=lambda one: one[1])
    if as_json:
        words = [plan_words(plan, request) | {"measured_s": took} for plan, took in both]
        told = {
            "topology": request.topology.to_dict(),
            "rate_of": rate_of(request),
            "fastest": config(fastest, request),
            "plans": words,
        }
        typer.echo(json.dumps(told, indent=2))
        return
    shown = table(plans, times, request)
    o.console_for(shown).print(shown)
    typer.echo(f"Fastest here: {fastest.forward.placed}. {block(fastest, request)}")


def rate_of(request: Request) -> str:
    """The kernel whose rate predictions go by: the one asked for, if the topology has its rate."""
    rates, wanted = request.topology.kernels, request.workload.kernel
    return wanted if wanted in dict(rates) else rates[0][0]


def priced(request: Request) -> Request:
    """The request by a rate that its topology has; what is run is the kernel that was asked for."""
    return replace(request, workload=replace(request.workload, kernel=rate_of(request)))


def with_ring(plans: list[Plan], request: Request, top: int) -> list[Plan]:
    """The first of the plans, and the plain ring to compare with if it is not among them.

    None of them needs more than the memory there is: it would be measured swapping, or end the job.

    Raises:
        ValueError: if no plan fits the memory, naming the one that comes closest.
    """
    check_memory(plans[0], request)
    placed = in_rank_order({"name": "ring"}, request.topology.size)
    ring = price_plan(request, 1, placed, placed)
    fits = [plan for plan in plans if plan.cost.memory_bytes <= request.memory_limit]
    first, is_over = fits[:top], ring.cost.memory_bytes > request.memory_limit
    if is_over or ring.choice in [plan.choice for plan in first]:
        return first
    return [*first, ring]


def prepare(plan: Plan, model: o.Model, comm: Any, device: Any) -> Callable[[], None]:
    """Forward and backward of a plan on random inputs."""
    import torch

    from wf_backends import SequenceParallel, SequenceParallelConfig

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

    return once


def heading(request: Request) -> str:
    """What is measured, and what its predictions go by where that is not what runs."""
    cluster, wanted, known = request.topology, request.workload.kernel, rate_of(request)
    told = f"{cluster.name}: {cluster.size} ranks; forward and backward"
    if wanted in (AUTO, known):
        return told
    return f"{told}; predicted by the rate of {known}: the topology has none of {wanted}"


def table(plans: list[Plan], times: list[float], request: Request) -> Table:
    """Predicted beside measured."""
    found = Table(title=escape(heading(request)))
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
            plan.split,
            str(plan.forward.placed),
            str(plan.backward.placed),
            plan.moves + (", kept" if plan.keep else ""),
        )
    return found
