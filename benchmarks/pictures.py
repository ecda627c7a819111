"""The pictures in docs/pictures, drawn from the planner's model and from a plan of AutoChunk.

    python benchmarks/pictures.py

Bytes are what plans say that a rank sends (traffic.py; the executor sends exactly these). Times are
predicted, not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
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

SIZES = (4, 8, 16, 32, 64)
RATES = (25, 50, 100, 200, 400, 800)  # Mbit/s
TOKENS = 8192


def lab(hosts: int, per_host: int, nics: int, mbit: float) -> Topology:
    """Hosts with shaped links and one CPU core a rank, in round numbers."""
    inside, between = Link(1e-4, 1.3e9), Link(1e-3, mbit * 1e6 / 8)
    rates = (("sdpa", KernelRate(2e10, 4e10, 5e-5)),)
    return Topology(f"{mbit} Mbit/s", hosts, per_host, nics, inside, between, rates, 64e9)


Scheme = Callable[[Request], Plan | None]
SCHEMES: tuple[tuple[str, Scheme], ...] = (
    ("ring", lambda request: named_plan(request, 1, name="ring")),
    ("concentric, C = 2", lambda r: named_plan(r, 1, name="concentric", team_size=2)),
    ("concentric, C = 4", lambda r: named_plan(r, 1, name="concentric", team_size=4)),
    ("mesh, nearly square", lambda r: named_plan(r, 1, **square_mesh(r.topology.size))),
    ("Ulysses x ring, u = 4", lambda request: named_plan(request, 4, name="ring")),
    ("planner, u = 1", lambda request: best_plan(replace(request, degrees=(1,)))),
    ("planner", best_plan),
)
STYLES = {"planner": {"color": "black", "linestyle": "--"}, "planner, u = 1": {"linestyle": ":"}}


def bytes_against_ranks(axes: Any, kv_heads: int, title: str) -> None:
    """Forward and backward, the busiest of P ranks that have a NIC each."""
    shape = Shape(1, 32, kv_heads, 128, itemsize=2)
    for name, scheme in SCHEMES[:-2]:
        points: list[tuple[int, float]] = []
        for size in SIZES:
            workload = Workload(shape, 4096 * size)
            plan = scheme(Request(lab(size, 1, 1, 100), workload, exact_up_to=16))
            if plan is not None:
                points.append((size, plan.cost.nic_bytes / 2**20))
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xticks=SIZES, xticklabels=SIZES, title=title)
    axes.minorticks_off()
    axes.set(xlabel="ranks, 4,096 tokens each", ylabel="MiB sent by the busiest rank")


def time_against_rate(axes: Any, hosts: int, per_host: int, nics: int) -> None:
    """Predicted seconds of forward and backward under shaped links."""
    workload = Workload(Shape(1, 8, 8, 64, itemsize=4), TOKENS, Mask(CAUSAL))
    for name, scheme in SCHEMES:
        seconds: list[float] = []
        for rate in RATES:
            request = Request(lab(hosts, per_host, nics, rate), workload)
            plan = scheme(request)
            seconds += [plan.cost.seconds] if plan else []
        if seconds:
            style: dict[str, Any] = STYLES.get(name, {})
            axes.plot(RATES, seconds, marker="o", markersize=3, label=name, **style)
    kind = "one NIC a rank" if nics == per_host else "one NIC a host"
    axes.set(xscale="log", yscale="log", xticks=RATES, xticklabels=RATES)
    axes.minorticks_off()
    axes.set(title=f"{hosts} hosts x {per_host} ranks, {kind}", xlabel="Mbit/s")


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
    shapes = ((4, 2, 1), (4, 2, 2), (2, 4, 1), (2, 4, 4))
    for axes, shape in zip(panels.flat, shapes, strict=True):
        time_against_rate(axes, *shape)
    for axes in panels[:, 0]:
        axes.set_ylabel("predicted seconds")
    panels[0, 0].legend()
    figure.suptitle(f"{TOKENS:,} tokens, 8 heads of 64, float32, causal; forward and backward")
    figure.savefig(path, dpi=130)


def draw_chunks(path: Path) -> None:
    """The live activations of an Evoformer block of 64 residues, as it is and in slices."""
    model, inputs = evoformer(64, fused=False)
    found = memory_profiles(model.eval(), inputs)
    draw_memory(found, None, path, "An Evoformer block, 32 sequences of 64 residues")


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
