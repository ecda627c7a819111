"""`wallfacer bench`: predicted and measured times of the best plans on the running job."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from rich.console import Console
from rich.progress import track
from torch.profiler import profile, record_function
from typer import Option

from wf_backends import SequenceParallel, SequenceParallelConfig, launch
from wf_backends._validation import AUTO
from wf_backends.cli import options as o
from wf_backends.cli.plan import config, config_block, plain_ring, plan_data
from wf_backends.cli.tables import print_json, table_of, wide_console
from wf_backends.cluster import Timer, job_topology
from wf_backends.comm import Communicator, make_comm
from wf_backends.parallel import mask_arguments
from wf_backends.planner import Plan, Request, all_plans, check_memory, milliseconds, scheme

EXACT_RANKS = 16  # on more, counting every message of every plan takes long


@o.describes_model(heads=8, head_dim=64, seqlen=8192, dtype="float32")
def bench(
    model: o.Model,
    topology: Annotated[str, Option(help="A preset, a file, or measure; empty = measure.")] = "",
    cache_dir: o.CacheDir = None,
    top: Annotated[int, Option(help="How many plans to run.")] = 5,
    repeats: Annotated[int, Option(help="Runs of each plan; the median counts.")] = 5,
    layers: o.Layers = 0,
    trace: Annotated[Path | None, Option(help="Write a Chrome trace of each rank: .json.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Run the best plans on this job, and the plain ring to compare with.

    Examples:

        mpirun -n 4 wallfacer bench --seqlen 8192

        torchrun --nproc-per-node 4 -m wf_backends.cli bench --topology cluster.json --json

        mpirun -n 4 wallfacer bench --top 2 --trace trace.json
    """
    o.check_file("--trace", trace, (".json",))
    o.check_range(1, top=top, repeats=repeats)
    workload = model.workload()
    with closing(launch.init()) as launched:
        comm, device = make_comm(), launched.device
        cluster = job_topology(comm, topology, device, o.cache_folder_of(cache_dir))
        request = Request(cluster, workload, exact_up_to=EXACT_RANKS, **o.layer_arguments(layers))
        rated = with_rate(request)
        plans = with_ring(all_plans(rated), rated, top)
        inputs = cache(partial(draw_inputs, model, comm.rank, device))
        calls = [prepare(plan, model, comm, inputs) for plan in plans]
        times = run(calls, Timer(comm, device), repeats)
        if trace is not None:
            write_trace(plans, calls, comm, trace)
    if launched.rank == 0:
        show(plans, times, request, as_json)


def run(calls: list[Callable[[], None]], timer: Timer, repeats: int) -> list[float]:
    """Median seconds of each plan's call, until the slowest rank has finished.

    The plans run alternately, so that other load on the machine slows all of them equally.
    """
    console = Console(stderr=True)
    for call in calls:
        call()  # allocates buffers
    turns = track(range(repeats), "running", disable=timer.comm.rank > 0, console=console)
    times = [[timer.times(call, 1)[0] for call in calls] for _ in turns]
    return [median(plan_times) for plan_times in zip(*times, strict=True)]


def write_trace(
    plans: list[Plan], calls: list[Callable[[], None]], comm: Communicator, path: Path
) -> None:
    """Write this rank's trace of one call of each plan, with torch's profiler."""
    with profile() as profiler:
        for plan, call in zip(plans, calls, strict=True):
            with record_function(f"wallfacer plan {scheme(plan, comm.size)}"):
                call()
    profiler.export_chrome_trace(str(path.with_stem(f"{path.stem}-rank{comm.rank}")))


def show(plans: list[Plan], times: list[float], request: Request, as_json: bool) -> None:
    """Print predicted and measured times (seconds of each plan), and the fastest plan's config."""
    measured = list(zip(plans, times, strict=True))
    fastest = plans[times.index(min(times))]
    if as_json:
        data = {
            "topology": request.topology.to_dict(),
            "rate_of": with_rate(request).workload.kernel,
            "fastest": config(fastest, request),
            "plans": [plan_data(plan, request) | {"measured_s": time} for plan, time in measured],
        }
        return print_json(data)
    size = request.topology.size
    rows = [
        {
            "plan": scheme(plan, size),
            "predicted ms": milliseconds(plan.cost.seconds),
            "measured ms": milliseconds(time),
            "measured / predicted": f"{time / plan.cost.seconds:.2f}",
        }
        for plan, time in measured
    ]
    wide_console().print(table_of(heading(request), rows))
    print(f"Fastest here: {scheme(fastest, size)}. {config_block(fastest, request)}")


def with_rate(request: Request) -> Request:
    """The request with a kernel that has a rate: the one that runs, or the topology's first."""
    rates, kernel = request.topology.kernels, request.workload.kernel
    kernel = kernel if kernel in dict(rates) else rates[0][0]
    return replace(request, workload=replace(request.workload, kernel=kernel))


def with_ring(plans: list[Plan], request: Request, top: int) -> list[Plan]:
    """The first `top` plans, followed by the plain ring if it is not among them.

    Plans over the memory limit are left out: they would swap or crash. If all are over it, a
    ValueError names the plan that needs least.
    """
    check_memory(plans[0], request)
    ring = plain_ring(request)
    fits = [plan for plan in plans if plan.cost.memory_bytes <= request.memory_limit]
    is_listed = ring.choice in [plan.choice for plan in fits[:top]]
    is_over_limit = ring.cost.memory_bytes > request.memory_limit
    return fits[:top] if is_listed or is_over_limit else [*fits[:top], ring]


def draw_inputs(model: o.Model, rank: int, device: Any, rows: int) -> tuple[Any, ...]:
    """Random q, k, v and dout of a rank, (batch, rows, heads, head_dim or value_dim) each."""
    generator = torch.Generator().manual_seed(rank)
    heads, kv_heads = model.heads, model.kv_heads or model.heads
    head_dim, value_dim = model.head_dim, model.value_dim or model.head_dim
    sizes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim)
    tensors = (torch.randn(model.batch, rows, *size, generator=generator) for size in sizes)
    q, k, v, dout = (tensor.to(device, getattr(torch, model.dtype)) for tensor in tensors)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def prepare(
    plan: Plan, model: o.Model, comm: Any, inputs: Callable[[int], tuple[Any, ...]]
) -> Callable[[], None]:
    """A function that runs forward and backward of a plan; inputs(rows) are q, k, v and dout."""
    settings = plan.choice.to_config(comm.size, model.layout)
    settings |= {"kernel": model.kernel, "partials": model.partials}
    sp = SequenceParallel(SequenceParallelConfig.from_dict(settings), comm)
    mask = model.mask_arguments()
    q, k, v, dout = inputs(len(sp.positions(model.seqlen, **mask_arguments(mask))))

    def call() -> None:
        out = sp.attention(q, k, v, seqlen=model.seqlen, **mask)
        torch.autograd.grad(out, (q, k, v), dout)

    return call


def heading(request: Request) -> str:
    """The table's title; it names the kernel whose rate predicts if another kernel runs."""
    cluster, kernel = request.topology, request.workload.kernel
    rated_kernel = with_rate(request).workload.kernel
    title = f"{cluster.name}: {cluster.size} ranks; forward and backward"
    if kernel in (AUTO, rated_kernel):
        return title
    return f"{title}; predicted by the rate of {rated_kernel}: the topology has none of {kernel}"
