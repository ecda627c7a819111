"""`wallfacer plan`: the plans for a workload on a cluster, by predicted time."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from typer import Option

from wf_backends._validation import AUTO, MAX_PARTS
from wf_backends.cli import options as o
from wf_backends.cli.budget import make_budget, show_budget
from wf_backends.cli.plan_table import full_table, short_table
from wf_backends.cli.tables import print_json, wide_console
from wf_backends.cluster import load_extended
from wf_backends.lowering import ACTIVATION
from wf_backends.planner import (
    EXACT_UP_TO,
    SPARSE_EXACT_UP_TO,
    Choice,
    Plan,
    Request,
    all_plans,
    best_plan,
    milliseconds,
    plan_for,
    price_plan,
    reason,
    representative,
    with_message_counts,
)
from wf_backends.schedule import default_placement, make_layout

MAX_MEMORY_GIB = 2**20  # of a rank
FIGURES = ("compute_s", "exposed_s", "nic_bytes", "inside_bytes", "memory_bytes")  # of a Cost


@o.describes_model(documents=0)
def plan(
    model: o.Model,
    topology: o.TopologyName = "h100-8x400g",
    ranks: Annotated[int, Option(help="Ranks of one sequence; 0 = all.")] = 0,
    ulysses_degree: Annotated[int, Option(help="Only this head split; 0 = all.")] = 0,
    memory_gib: Annotated[
        float, Option(help="A rank's memory for attention, or with --model for training; 0 = all.")
    ] = 0,
    data_parallel_size: Annotated[int, Option(help="Groups that share ZeRO's states.")] = 1,
    exact_up_to: Annotated[
        int, Option(help="Count every message up to this many ranks; default: as a call does.")
    ] = EXACT_UP_TO,
    layers: o.Layers = 0,
    top: Annotated[
        int | None, Option(help="How many of the best plans to list.", show_default="6")
    ] = None,
    show_all: Annotated[bool, Option("--all", help="List every plan, with all figures.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """Show what "auto" chooses on a cluster and why, and the schemes that papers name.

    Examples:

        wallfacer plan --heads 32 --kv-heads 8 --seqlen 131072 --topology h100-8x400g

        wallfacer plan --model path/of/a/model --memory-gib 80 --topology my_cluster.toml --json

        wallfacer plan --ranks 8 --seqlen 65536 --documents 2048 --layout document_zigzag

        wallfacer plan --ranks 8 --seqlen 65536 --mask mask.json --layout balanced
    """
    o.check_range(0, ulysses_degree=ulysses_degree, exact_up_to=exact_up_to)
    o.check_range(0, MAX_PARTS, ranks=ranks)
    o.check_range(0, MAX_MEMORY_GIB, memory_gib=memory_gib)
    o.check_range(1, top=6 if top is None else top, data_parallel_size=data_parallel_size)
    if show_all and top is not None:
        raise ValueError(f"--all contradicts --top {top}: leave one of them out")
    cluster, added = load_extended(topology, ranks)
    o.check_range(0, MAX_PARTS, ranks=cluster.size)
    asked = Request(
        cluster,
        model.workload(),
        memory_bytes=memory_gib * 2**30 or None,
        degrees=(ulysses_degree,) if ulysses_degree else None,
        exact_up_to=exact_up_to,
        **o.layer_arguments(layers),
    )
    trained = (model.name, data_parallel_size) if model.name and memory_gib else None
    if data_parallel_size > 1 and trained is None:
        raise ValueError(f"--data-parallel-size {data_parallel_size} needs --model, --memory-gib")
    answer(asked, added, None if show_all else top or 6, as_json, trained)


def answer(
    asked: Request, added: int, top: int | None, as_json: bool, trained: tuple[str, int] | None
) -> None:
    """Print the choice and the reason for it, other plans, and the config to paste.

    Args:
        added: hosts that were added to those of the topology's file.
        top: how many plans; None: all, with all figures.
        trained: a model's name and the data parallel size, for a rank's budget in training.
    """
    cluster, workload, mask = asked.topology, asked.workload, asked.workload.mask
    make_layout(workload.layout, cluster.size, workload.seqlen, mask.cu_seqlens, mask.slices)
    request = priced(asked)
    best = plan_for(asked)
    all_ranked = [best, *(plan for plan in all_plans(request) if plan.choice != best.choice)]
    plans, ring = all_ranked[:top], plain_ring(request)
    reasons = [reason(best, asked), why(best, ring, request)]
    if request.topology.size != cluster.size:
        reasons.append(f"{request.topology.size} ranks stand for all {cluster.size}")
    reasons += other_layout(best, request)
    budget = make_budget(*trained, all_ranked, request, asked) if trained else None
    if as_json:
        data = {
            "topology": cluster.to_dict(),
            "hosts_added": added,
            "reason": ". ".join(reasons),
            "plans": [plan_data(plan, asked) for plan in plans],
            "ring": plan_data(ring, asked),
        }
        return print_json(data | ({"budget": budget} if budget else {}))
    ranks = f"{cluster.hosts} hosts x {cluster.ranks_per_host} ranks"
    title = f"{cluster.name}: {ranks}{o.added_hosts_note(added)}"
    if top is None:
        table, console = full_table(plans, ring, asked, title), wide_console()
    else:
        table, console = short_table(plans, ring, request, asked, title), Console()
    console.print(f"[bold]{escape(reasons[0])}.[/bold]", escape(". ".join(reasons[1:])) + ".", "")
    console.print(table)
    print(config_block(best, asked))
    if trained and budget:
        show_budget(trained[0], budget, console)


def priced(asked: Request) -> Request:
    """The request whose plans are compared: of similar calls, on some of many ranks.

    Refuses documents so long that these ranks would hold only a few of them.
    """
    similar, size = representative(asked), asked.topology.size
    documents, typical = (request.workload.mask.cu_seqlens for request in (asked, similar))
    if documents and not typical and size > SPARSE_EXACT_UP_TO:
        raise NotImplementedError(
            f"documents of this length are too long to plan for {size} ranks: give shorter "
            "--documents, fewer --ranks, or leave --documents out"
        )
    return with_message_counts(similar)


def plain_ring(request: Request) -> Plan:
    """The plan of Ring Attention, with which every plan is compared."""
    ring = default_placement({"name": "ring"}, request.topology.size)
    return price_plan(request, Choice(1, ring, ring))


def config_block(plan: Plan, request: Request) -> str:
    """The config of a plan, to be pasted."""
    title = 'The "wallfacer" block of a DeepSpeed JSON, or SequenceParallelConfig.from_dict:'
    return f"{title}\n{json.dumps(config(plan, request), indent=2)}"


def config(plan: Plan, request: Request) -> dict[str, Any]:
    """The config that runs a plan; it names the kernel and partials unless they are defaults."""
    workload = request.workload
    settings = plan.choice.to_config(request.topology.size, workload.layout)
    if workload.shape.partial_size is not None:
        settings |= {"partials": ACTIVATION}
    return settings if workload.kernel == AUTO else settings | {"kernel": workload.kernel}


def why(best: Plan, ring: Plan, request: Request) -> str:
    """The plan's speed against the plain ring, and how much of its transfers is hidden."""
    cost, hidden = best.cost, ""
    if cost.nic_bytes + cost.inside_bytes:
        share = 1 - cost.exposed_s / max(cost.exposed_s, cost.transfer_s)
        hidden = f", {share:.0%} of the transfer time hidden behind computing"
    method = "message by message" if request.is_exact else "by formulas"
    speed = f"{ring.cost.seconds / cost.seconds:.2f} x the ring's speed"
    return f"That is {speed}{hidden} (counted {method})"


def other_layout(best: Plan, request: Request) -> list[str]:
    """A hint if another layout is faster, under a sliding window or slices of a mask."""
    workload, mask = request.workload, request.workload.mask
    layouts = ("contiguous",) if mask.band.left < inf else ()
    if mask.slices is not None:
        layouts = ("balanced", "contiguous")
    seconds = dict[str, float]()
    for layout in (layout for layout in layouts if layout != workload.layout):
        other = replace(request, workload=replace(workload, layout=layout))
        with suppress(ValueError):  # no plan with this layout fits the memory
            seconds[layout] = best_plan(other).cost.seconds
    layout = min(seconds, key=seconds.__getitem__, default="")
    if not layout or seconds[layout] >= best.cost.seconds:
        return []
    return [
        f'Under this mask "layout": "{layout}" is faster, '
        f"{milliseconds(seconds[layout])} ms predicted: add --layout {layout}"
    ]


def plan_data(plan: Plan, request: Request) -> dict[str, Any]:
    """A plan as data."""
    choice, cost = plan.choice, plan.cost
    return {
        "config": config(plan, request),
        "in_rank_order": choice.in_rank_order,
        "forward": str(choice.forward),
        "backward": str(choice.backward),
        "predicted_s": cost.seconds,
        **{name: getattr(cost, name) for name in FIGURES},
        "fits_memory": cost.memory_bytes <= request.memory_limit,
    }
