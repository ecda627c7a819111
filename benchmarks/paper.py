"""The paper's experiment re-derived: training throughput that the planner's model predicts.

    python benchmarks/paper.py --out benchmarks/results/paper.md

Nothing here is measured. Links and kernels are the nominal figures of the presets (presets.py);
every scheme is priced by the same model (cost/exact_cost.py), as our executor would run it:
partial results in float32, needed rows only, hops and gathers behind the tiles. Percentages are
over the ring. StarTrail walks back with the queries, as the paper does. Ranks of a named scheme
stand in the order of their numbers; `auto` may place them. Clusters and models: arXiv 2407.00611,
section 4.
What it leaves open is assumed: 16, 32 and 36 layers, linear layers at 60 % of peak, NVLink inside
the A100 hosts, no optimizer and no gradient reduction. 12 heads do not divide GPT-3B's 4,096: heads
of 341 stand for them. "-": the heads do not divide by the ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from lab_schemes import head_split, named_plan, square_mesh
from measure import table_head, table_row

from wf_backends.cluster.presets import PRESETS
from wf_backends.cluster.topology import Topology
from wf_backends.cost.workload import Workload
from wf_backends.lowering.message_bytes import Shape
from wf_backends.planner import legal_degrees
from wf_backends.planner.plan import Plan, Request
from wf_backends.planner.search import best_plan, price_plan
from wf_backends.schedule.mask import CAUSAL, Mask

LENGTHS = (65536, 131072, 262144, 524288)
PAPER_SPEEDUP = MappingProxyType({"GPT": 0.7712, "DiT": 1.1433})
LINEAR_FLOPS = 72  # per token and h^2: 6 for each of the 12 h^2 weights of a layer


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the paper; `layers` is assumed, from its number of parameters."""

    name: str
    heads: int
    hidden: int
    layers: int
    causal: bool

    @property
    def mask(self) -> Mask:
        return Mask(CAUSAL) if self.causal else Mask()

    def workload(self, seqlen: int) -> Workload:
        shape = Shape(1, self.heads, self.heads, self.hidden // self.heads, itemsize=2)
        return Workload(shape, seqlen, self.mask)


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a cluster.

    linear_flops_per_s: of a rank, in the linear layers (60 % of peak).
    """

    model: Model
    cluster: Topology
    linear_flops_per_s: float

    def tokens_per_s(self, plan: Plan, seqlen: int) -> float:
        """Throughput of forward and backward, without the optimizer and gradient reduction."""
        flops_per_token = LINEAR_FLOPS * self.model.hidden**2
        linear_s = flops_per_token * seqlen / self.cluster.size / self.linear_flops_per_s
        return seqlen / (self.model.layers * (plan.cost.seconds + linear_s))


def cases() -> list[Case]:
    """The paper's clusters with their models."""
    h100, a100 = PRESETS["h100-8x400g"], PRESETS["a100-4x-100gbe"]
    gpts = (Model("GPT-3B", 12, 4096, 16, True), Model("GPT-7B", 32, 4096, 32, True))
    dit = Model("DiT-1B", 24, 1536, 36, False)
    result = [Case(gpt, h100, 0.6 * 989e12) for gpt in gpts]
    for hosts, ranks in ((16, 2), (8, 4), (4, 8)):
        cluster = replace(a100, name="A100 + 100 GbE", hosts=hosts, ranks_per_host=ranks)
        result.append(Case(dit, cluster, 0.6 * 312e12))
    return result


def schemes(request: Request) -> Mapping[str, Plan | None]:
    """The plans of all named schemes (None if one does not fit) and of the planner."""
    size, per_host = request.topology.size, request.topology.ranks_per_host
    usp = max(d for d in legal_degrees(request) if d <= per_host)
    mesh = square_mesh(size)
    plan = partial(named_plan, request)

    def auto(search_request: Request) -> Plan:
        chosen = best_plan(replace(search_request, exact_up_to=0))  # searched by closed forms
        return price_plan(request, chosen.choice)  # priced message by message

    return {
        "Ring": plan(1, name="ring"),
        "StarTrail C=2": plan(1, "queries", name="concentric", team_size=2),
        "StarTrail C=4": plan(1, "queries", name="concentric", team_size=4),
        "double ring": plan(1, name="double_ring", inner=per_host),
        f"USP u={usp}": plan(usp, name="ring"),
        "Ulysses": plan(size, name="ring"),
        f"mesh {mesh['rows']} x {mesh['cols']}": plan(1, **mesh),
        "auto, heads at once": auto(replace(request, chunks=(1,))),
        "auto": auto(request),
    }


def rows(case: Case) -> list[list[str]]:
    """A head row, then a row per length: tokens/s of the ring, the other schemes relative to it."""
    table: list[list[str]] = []
    for seqlen in LENGTHS:
        request = Request(case.cluster, case.model.workload(seqlen), exact_up_to=case.cluster.size)
        plans = schemes(request)
        names = [name for name in plans if name != "Ring"]
        if not table:
            table.append(["tokens", "Ring, tokens/s", *names, "auto is"])
        ring_plan, auto = plans["Ring"], plans["auto"]
        assert ring_plan is not None and auto is not None
        ring = case.tokens_per_s(ring_plan, seqlen)
        others: list[str] = []
        for name in names:
            plan = plans[name]
            speedup = case.tokens_per_s(plan, seqlen) / ring - 1 if plan else None
            others.append("-" if speedup is None else f"{speedup:+.1%}")
        table.append([f"{seqlen // 1024}k", f"{ring:,.0f}", *others, describe(auto)])
    return table


def describe(plan: Plan) -> str:
    """The text of a plan in a cell."""
    choice = plan.choice
    forward, backward = choice.forward, choice.backward
    return f"u={head_split(choice)}; {forward}; back: {backward}, {choice.moves} walk"


def report() -> str:
    parts = [f"{(__doc__ or '').strip()}\n"]
    for case in cases():
        cluster = case.cluster
        shape = f"{cluster.hosts} x {cluster.ranks_per_host}, {cluster.nics_per_host} NICs a host"
        headline = PAPER_SPEEDUP[case.model.name[:3]]
        title = f"## {case.model.name} on {cluster.name} ({shape})\n"
        head, *body = rows(case)
        parts += [title, table_head(*head), *(table_row(*cells) for cells in body)]
        parts += [f"\nThe paper's headline: up to {headline:+.2%}.\n"]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write here; else print")
    out = parser.parse_args().out
    text = report()
    if out is None:
        print(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)


if __name__ == "__main__":
    main()
