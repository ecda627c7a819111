"""`wallfacer plan`: candidates by predicted time."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from typer import Option

from wf_backends._validation import AUTO
from wf_backends._validation import MAX_COUNT as MAX_RANKS
from wf_backends.cli import options as o
from wf_backends.cli.budget import budget_of, show_budget
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
    check_memory,
    milliseconds,
    plan_for,
    price_plan,
    reason,
    representative,
    with_message_counts,
)
from wf_backends.schedule import in_rank_order, make_layout

MOST_GIB = 2**20  # of a rank
FIGURES = ("compute_s", "exposed_s", "nic_bytes", "inside_bytes", "memory_bytes")  # of a cost


@o.describes_model(documents=0)
def plan(
    model: o.Model,
    topology: o.TopologyName = "h100-8x400g",
    ranks: Annotated[int, Option(help="Ranks of one sequence; 0 = all.")] = 0,
    ulysses_degree: Annotated[int, Option(help="Only this head split; 0 = all.")] = 0,
    memory_gib: Annotated[
        float, Option(help="What attention, or with --model training, may take of a rank; 0 = all.")
    ] = 0,
    data_parallel_size: Annotated[
        int, Option(help="Groups of such ranks, which share ZeRO's states in the budget.")
    ] = 1,
    exact_up_to: Annotated[
        int, Option(help="Ranks up to which every message is counted; a call's by default.")
    ] = EXACT_UP_TO,
    layers: o.Layers = 0,
    top: Annotated[
        int | None, Option(help="How many of the best plans to list.", show_default="6")
    ] = None,
    show_all: Annotated[bool, Option("--all", help="List every plan, with all figures.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """What "auto" chooses on a cluster and why, beside the schemes that papers name.

    Examples:

        wallfacer plan --heads 32 --kv-heads 8 --seqlen 131072 --topology h100-8x400g

        wallfacer plan --model path/of/a/model --topology my_cluster.toml --ranks 16 --json

        wallfacer plan --model path/of/a/model --memory-gib 80

        wallfacer plan --ranks 8 --seqlen 65536 --documents 2048 --layout document_zigzag

        wallfacer plan --ranks 8 --seqlen 65536 --mask mask.json --layout balanced
    """
    o.check_range(0, ulysses_degree=ulysses_degree, exact_up_to=exact_up_to)
    o.check_range(0, MAX_RANKS, ranks=ranks)
    o.check_range(0, MOST_GIB, memory_gib=memory_gib)
    o.check_range(1, top=6 if top is None else top, data_parallel_size=data_parallel_size)
    if show_all and top is not None:
        raise ValueError(f"--all lists every plan, and --top {top} some: give one of them")
    cluster, added = load_extended(topology, ranks)
    asked = Request(
        cluster,
        model.workload(),
        memory_bytes=memory_gib * 2**30 or None,
        degrees=(ulysses_degree,) if ulysses_degree else None,
        exact_up_to=exact_up_to,
        **o.keeping(layers),
    )
    trained = (model.name, data_parallel_size) if model.name and memory_gib else None
    if data_parallel_size > 1 and trained is None:
        raise ValueError(
            f"--data-parallel-size {data_parallel_size} counts in the budget of a model: give "
            "--model and --memory-gib too"
        )
    answer(asked, added, None if show_all else top or 6, as_json, trained)


def answer(
    asked: Request, added: int, top: int | None, as_json: bool, trained: tuple[str, int] | None
) -> None:
    """Print the choice and the reason for it, other plans, and the config to paste.

    Args:
        added: hosts that the topology's file does not have.
        top: how many plans; None = all, with all that is predicted of them.
        trained: a model's name and the data parallel size, if a rank's whole budget is wanted.
    """
    at, work = asked.topology, asked.workload
    make_layout(work.layout, at.size, work.seqlen, work.mask.cu_seqlens, work.mask.slices)
    request = priced(asked)
    best = check_memory(plan_for(asked), request)
    every = [best, *(one for one in all_plans(request) if one.choice != best.choice)]
    plans, ring = every[:top], plain_ring(request)
    some = request.topology.size
    stand_in = [] if some == at.size else [f"{some} ranks stand for all {at.size}"]
    told = [reason(best, asked), why(best, ring, request), *stand_in, *other_layout(best, request)]
    budget = budget_of(*trained, every, request, asked) if trained else None
    if as_json:
        found = {
            "topology": at.to_dict(),
            "hosts_added": added,
            "reason": ". ".join(told),
            "plans": [plan_words(one, asked) for one in plans],
            "ring": plan_words(ring, asked),
        }
        print_json(found | ({"budget": budget} if budget else {}))
        return
    title = f"{at.name}: {at.hosts} hosts x {at.ranks_per_host} ranks{o.added_words(added)}"
    if top is None:
        table, console = full_table(plans, ring, asked, title), wide_console()
    else:
        table, console = short_table(plans, ring, request, asked, title), Console()
    console.print(f"[bold]{escape(told[0])}.[/bold]", escape(". ".join(told[1:])) + ".", "")
    console.print(table)
    print(block(best, asked))
    if trained and budget:
        show_budget(trained[0], budget, console)


def priced(asked: Request) -> Request:
    """The request whose plans are compared: that of all calls like it, on some ranks of many.

    Documents so long that those ranks would hold few of them are refused.
    """
    similar, size = representative(asked), asked.topology.size
    documents, typical = (request.workload.mask.cu_seqlens for request in (asked, similar))
    if documents and not typical and size > SPARSE_EXACT_UP_TO:
        raise NotImplementedError(
            f"on {size} ranks documents are predicted if a few ranks hold several of them, at most "
            f"{SPARSE_EXACT_UP_TO} ranks eight: give shorter --documents, fewer --ranks or none"
        )
    return with_message_counts(similar)


def plain_ring(request: Request) -> Plan:
    """Ring Attention, with which every plan is compared."""
    ring = in_rank_order({"name": "ring"}, request.topology.size)
    return price_plan(request, Choice(1, ring, ring))


def block(plan: Plan, request: Request) -> str:
    """The config of a plan, to be pasted."""
    told = 'The "wallfacer" block of a DeepSpeed JSON, or SequenceParallelConfig.from_dict:'
    return f"{told}\n{json.dumps(config(plan, request), indent=2)}"


def config(plan: Plan, request: Request) -> dict[str, Any]:
    """The config that runs a plan, with the kernel and partials if they were asked for by name."""
    work = request.workload
    words = plan.choice.to_config(request.topology.size, work.layout)
    if work.shape.partial_size is not None:
        words |= {"partials": ACTIVATION}
    return words if work.kernel == AUTO else words | {"kernel": work.kernel}


def why(best: Plan, ring: Plan, request: Request) -> str:
    """The choice beside the plain ring, and how much of its transfers is hidden, if it has any."""
    cost = best.cost
    hidden = ""
    if cost.nic_bytes + cost.inside_bytes:
        share = 1 - cost.exposed_s / max(cost.exposed_s, cost.transfer_s)
        hidden = f", {share:.0%} of the transfer time hidden behind computing"
    counted = "message by message" if request.is_exact else "by formulas"
    faster = f"{ring.cost.seconds / cost.seconds:.2f} x the ring's speed"
    return f"That is {faster}{hidden} (counted {counted})"


def other_layout(best: Plan, request: Request) -> list[str]:
    """What is said if another layout is faster under a sliding window or slices of a mask."""
    work, mask = request.workload, request.workload.mask
    near = ("contiguous",) if mask.band.left < inf else ()
    found = {
        layout: best_plan(replace(request, workload=replace(work, layout=layout)))
        for layout in (near if mask.slices is None else ("balanced", "contiguous"))
        if layout != work.layout
    }
    layout = min(found, key=lambda name: found[name].cost.seconds, default="")
    if not layout or found[layout].cost.seconds >= best.cost.seconds:
        return []
    return [
        f'Under this mask "layout": "{layout}" is faster, '
        f"{milliseconds(found[layout].cost.seconds)} ms predicted: add --layout {layout}"
    ]


def plan_words(plan: Plan, request: Request) -> dict[str, Any]:
    """One candidate as data."""
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
