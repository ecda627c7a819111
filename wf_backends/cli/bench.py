"""`wallfacer bench`: the best candidates on the running job, predicted beside measured."""

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
from wf_backends.cli.plan import block, config, plain_ring, plan_words
from wf_backends.cli.tables import print_json, table_of, wide_console
from wf_backends.cluster import Timer, job_topology
from wf_backends.comm import Communicator, make_comm
from wf_backends.planner import Plan, Request, all_plans, check_memory, milliseconds, scheme
from wf_backends.schedule import SLICE_WORDS

EXACT_UP_TO = 16  # ranks; beyond, pricing every candidate message by message takes long


@o.describes_model(heads=8, head_dim=64, seqlen=8192, dtype="float32")
def bench(
    model: o.Model,
    topology: Annotated[str, Option(help="A preset or a file; empty = measured on this job.")] = "",
    cache_dir: o.CacheDir = None,
    top: Annotated[int, Option(help="How many candidates to run.")] = 5,
    repeats: Annotated[int, Option(help="Runs of each; the median counts.")] = 5,
    layers: o.Layers = 0,
    trace: Annotated[Path | None, Option(help="Chrome traces of all ranks: .json.")] = None,
    as_json: o.AsJson = False,
) -> None:
    """Run the best candidates on this job, and the plain ring beside them.

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
        found = job_topology(comm, topology, device, o.folder_of(cache_dir))
        request = Request(found, workload, exact_up_to=EXACT_UP_TO, **o.keeping(layers))
        plans = with_ring(all_plans(priced(request)), priced(request), top)
        inputs = cache(partial(draw_inputs, model, comm.rank, device))
        works = [prepare(plan, model, comm, inputs) for plan in plans]
        times = run(works, Timer(comm, device), repeats)
        if trace is not None:
            write_trace(plans, works, comm, trace)
    if launched.rank == 0:
        show(plans, times, request, as_json)


def run(works: list[Callable[[], None]], timer: Timer, repeats: int) -> list[float]:
    """Median seconds of each plan's work until the slowest rank is done.

    The plans take turns, so that whatever else the machine does slows all of them alike.
    """
    shown = Console(stderr=True)
    for work in works:
        work()  # so that buffers exist
    rounds = track(range(repeats), "running", disable=timer.comm.rank > 0, console=shown)
    times = [[timer.times(work, 1)[0] for work in works] for _ in rounds]
    return [median(of_plan) for of_plan in zip(*times, strict=True)]


def write_trace(
    plans: list[Plan], works: list[Callable[[], None]], comm: Communicator, path: Path
) -> None:
    """Write what this rank does in one run of each plan, as torch's profiler sees it."""
    with profile() as found:
        for plan, work in zip(plans, works, strict=True):
            with record_function(f"wallfacer plan {scheme(plan, comm.size)}"):
                work()
    found.export_chrome_trace(str(path.with_stem(f"{path.stem}-rank{comm.rank}")))


def show(plans: list[Plan], times: list[float], request: Request, as_json: bool) -> None:
    """Predicted beside measured, and the config of what was fastest."""
    both = list(zip(plans, times, strict=True))
    fastest, _ = min(both, key=lambda one: one[1])
    if as_json:
        told = {
            "topology": request.topology.to_dict(),
            "rate_of": priced(request).workload.kernel,
            "fastest": config(fastest, request),
            "plans": [plan_words(plan, request) | {"measured_s": took} for plan, took in both],
        }
        print_json(told)
        return
    size = request.topology.size
    rows = [
        {
            "plan": scheme(plan, size),
            "predicted ms": milliseconds(plan.cost.seconds),
            "measured ms": milliseconds(took),
            "measured / predicted": f"{took / plan.cost.seconds:.2f}",
        }
        for plan, took in both
    ]
    wide_console().print(table_of(heading(request), rows))
    print(f"Fastest here: {scheme(fastest, size)}. {block(fastest, request)}")


def priced(request: Request) -> Request:
    """The request by the rate of the kernel that runs; by the topology's first if it has none."""
    rates, wanted = request.topology.kernels, request.workload.kernel
    known = wanted if wanted in dict(rates) else rates[0][0]
    return replace(request, workload=replace(request.workload, kernel=known))


def with_ring(plans: list[Plan], request: Request, top: int) -> list[Plan]:
    """The first `top` plans, followed by the plain ring if it is not among them.

    Plans that need more memory than there is are left out: they would swap, or end the job. If all
    do, a ValueError names the one that comes closest.
    """
    check_memory(plans[0], request)
    ring = plain_ring(request)
    fits = [plan for plan in plans if plan.cost.memory_bytes <= request.memory_limit]
    listed = ring.choice in [plan.choice for plan in fits[:top]]
    is_over = ring.cost.memory_bytes > request.memory_limit
    return fits[:top] if listed or is_over else [*fits[:top], ring]


def draw_inputs(model: o.Model, rank: int, device: Any, rows: int) -> tuple[Any, ...]:
    """Random q, k, v and dout of a rank, (batch, rows, heads, head_dim or value_dim) each."""
    generator, kv_heads = torch.Generator().manual_seed(rank), model.kv_heads or model.heads
    dim, value = model.head_dim, model.value_dim or model.head_dim
    sizes = (model.heads, dim), (kv_heads, dim), (kv_heads, value), (model.heads, value)
    drawn = (torch.randn(model.batch, rows, *size, generator=generator) for size in sizes)
    q, k, v, dout = (x.to(device, getattr(torch, model.dtype)) for x in drawn)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def prepare(
    plan: Plan, model: o.Model, comm: Any, inputs: Callable[[int], tuple[Any, ...]]
) -> Callable[[], None]:
    """Forward and backward of a plan on the inputs of so many rows."""
    words = plan.choice.to_config(comm.size, model.layout)
    words |= {"kernel": model.kernel, "partials": model.partials}
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
    mask = model.mask_words()
    slices = {key: mask[key] for key in SLICE_WORDS if key in mask}
    q, k, v, dout = inputs(len(sp.positions(model.seqlen, **slices)))

    def once() -> None:
        out = sp.attention(q, k, v, seqlen=model.seqlen, **mask)
        torch.autograd.grad(out, (q, k, v), dout)

    return once


def heading(request: Request) -> str:
    """What is measured, and whose rate predicts it if that is not the kernel that runs."""
    cluster, wanted = request.topology, request.workload.kernel
    known = priced(request).workload.kernel
    told = f"{cluster.name}: {cluster.size} ranks; forward and backward"
    if wanted in (AUTO, known):
        return told
    return f"{told}; predicted by the rate of {known}: the topology has none of {wanted}"
