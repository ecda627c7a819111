"""Draw the pictures in docs/pictures, from the planner's cost model and a plan of AutoChunk.

    python benchmarks/pictures.py

Bytes are those that a rank sends according to its plan; runs send exactly these. Times are
predicted, not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autochunk_models import evoformer
from lab_schemes import named_plan, square_mesh
from matplotlib.figure import Figure

from wf_backends.autochunk import memory_profiles
from wf_backends.cli.draw import draw_memory
from wf_backends.cluster.topology import KernelRate, Link, Topology
from wf_backends.cost.workload import Workload
from wf_backends.lowering.message_bytes import Shape
from wf_backends.planner.plan import Plan, Request
from wf_backends.planner.search import best_plan
from wf_backends.schedule.mask import CAUSAL, Mask

RANK_COUNTS = (4, 8, 16, 32, 64)
LINK_RATES = (25, 50, 100, 200, 400, 800)  # Mbit/s
SEQLEN = 8192


def lab_topology(hosts: int, ranks_per_host: int, nics: int, rate: float) -> Topology:
    """The network lab in round numbers: shaped links of `rate` Mbit/s, one CPU core a rank."""
    inside, between = Link(1e-4, 1.3e9), Link(1e-3, rate * 1e6 / 8)
    kernels = (("sdpa", KernelRate(2e10, 4e10, 5e-5)),)
    name = f"{rate} Mbit/s"
    return Topology(name, hosts, ranks_per_host, nics, inside, between, kernels, 64e9)


Scheme = Callable[[Request], Plan | None]  # None: it does not fit the ranks or heads
NAMED_SCHEMES: tuple[tuple[str, Scheme], ...] = (
    ("ring", partial(named_plan, degree=1, name="ring")),
    ("concentric, C = 2", partial(named_plan, degree=1, name="concentric", team_size=2)),
    ("concentric, C = 4", partial(named_plan, degree=1, name="concentric", team_size=4)),
    ("mesh, nearly square", lambda r: named_plan(r, 1, **square_mesh(r.topology.size))),
    ("Ulysses x ring, u = 4", partial(named_plan, degree=4, name="ring")),
)
PLANNER_SCHEMES: tuple[tuple[str, Scheme], ...] = (
    ("planner, u = 1", lambda request: best_plan(replace(request, degrees=(1,)))),
    ("planner", best_plan),
)
STYLES = {"planner": {"color": "black", "linestyle": "--"}, "planner, u = 1": {"linestyle": ":"}}


def bytes_against_ranks(axes: Any, kv_heads: int, title: str) -> None:
    """Plot the bytes that the busiest rank sends in forward and backward; a rank has a NIC."""
    shape = Shape(1, 32, kv_heads, 128, itemsize=2)
    for name, scheme in NAMED_SCHEMES:
        ranks: list[int] = []
        mebibytes: list[float] = []
        for num_ranks in RANK_COUNTS:
            topology = lab_topology(num_ranks, 1, 1, 100)
            workload = Workload(shape, 4096 * num_ranks)
            plan = scheme(Request(topology, workload, exact_up_to=16))
            if plan is not None:
                ranks.append(num_ranks)
                mebibytes.append(plan.cost.nic_bytes / 2**20)
        axes.plot(ranks, mebibytes, marker="o", label=name)
    axes.set(xscale="log", yscale="log", xticks=RANK_COUNTS, xticklabels=RANK_COUNTS, title=title)
    axes.minorticks_off()
    axes.set(xlabel="ranks, 4,096 tokens each", ylabel="MiB sent by the busiest rank")


def time_against_rate(axes: Any, hosts: int, ranks_per_host: int, nics: int) -> None:
    """Plot predicted seconds of forward and backward against the rate of the links."""
    workload = Workload(Shape(1, 8, 8, 64, itemsize=4), SEQLEN, Mask(CAUSAL))
    topologies = [lab_topology(hosts, ranks_per_host, nics, rate) for rate in LINK_RATES]
    for name, scheme in (*NAMED_SCHEMES, *PLANNER_SCHEMES):
        plans = [scheme(Request(topology, workload)) for topology in topologies]
        seconds = [plan.cost.seconds for plan in plans if plan is not None]
        if seconds:  # a scheme fits at all rates or at none
            style: dict[str, Any] = STYLES.get(name, {})
            axes.plot(LINK_RATES, seconds, marker="o", markersize=3, label=name, **style)
    placement = "one NIC a rank" if nics == ranks_per_host else "one NIC a host"
    axes.set(xscale="log", yscale="log", xticks=LINK_RATES, xticklabels=LINK_RATES)
    axes.minorticks_off()
    axes.set(title=f"{hosts} hosts x {ranks_per_host} ranks, {placement}", xlabel="Mbit/s")


def draw_bytes(path: Path) -> None:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    bytes_against_ranks(left, 32, "32 query heads, 32 key heads (MHA), bfloat16")
    bytes_against_ranks(right, 8, "32 query heads, 8 key heads (GQA), bfloat16")
    left.legend()
    figure.savefig(path, dpi=130)


def draw_time(path: Path) -> None:
    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = figure.subplots(2, 2, sharey=True)
    clusters = ((4, 2, 1), (4, 2, 2), (2, 4, 1), (2, 4, 4))  # hosts, ranks per host, NICs per host
    for axes, cluster in zip(panels.flat, clusters, strict=True):
        time_against_rate(axes, *cluster)
    for axes in panels[:, 0]:
        axes.set_ylabel("predicted seconds")
    panels[0, 0].legend()
    figure.suptitle(f"{SEQLEN:,} tokens, 8 heads of 64, float32, causal; forward and backward")
    figure.savefig(path, dpi=130)


def draw_chunks(path: Path) -> None:
    """Draw the live activations of an Evoformer block of 64 residues, as it is and in slices."""
    model, inputs = evoformer(64, fused=False)
    profiles = memory_profiles(model.eval(), inputs)
    draw_memory(profiles, None, path, "An Evoformer block, 32 sequences of 64 residues")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="folder to write")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    draw_bytes(out / "bytes_against_ranks.png")
    draw_time(out / "time_against_link.png")
    draw_chunks(out / "autochunk_memory.png")


if __name__ == "__main__":
    main()
