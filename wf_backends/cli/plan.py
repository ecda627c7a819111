"""`wallfacer plan`: candidates by predicted time."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from wf_backends._validation import AUTO
from wf_backends.cli import options as o
from wf_backends.planner import (
    EXACT_UP_TO,
    NEAR_UP_TO,
    Plan,
    Request,
    all_plans,
    best_plan,
    check_memory,
    on_few,
    on_fewer_ranks,
    price_plan,
)
from wf_backends.schedule import in_rank_order, make_layout


@o.describes_model(heads=32, kv_heads=0, head_dim=128, seqlen=131072, documents=0)
def plan(
    model: o.Model,
    topology: o.TopologyName = "h100-8x400g",
    ranks: Annotated[int, typer.Option(help="Ranks of one sequence; 0 = all.")] = 0,
    ulysses_degree: Annotated[int, typer.Option(help="Only this head split; 0 = all.")] = 0,
    memory_gib: Annotated[
        float, typer.Option(help="What attention may take of a rank; 0 = all it has.")
    ] = 0,
    exact_up_to: Annotated[
        int, typer.Option(help="Ranks up to which every message is counted; a call's by default.")
    ] = EXACT_UP_TO,
    layers: o.Layers = 0,
    top: Annotated[int, typer.Option(help="Rows of the table.")] = 12,
    as_json: o.AsJson = False,
) -> None:
    """Predict what every scheme costs on a cluster, and name the fastest.

    Examples:

        wallfacer plan --heads 32 --kv-heads 8 --seqlen 131072 --topology h100-8x400g

        wallfacer plan --model path/of/a/model --topology my_cluster.toml --ranks 16 --json

        wallfacer plan --ranks 8 --seqlen 65536 --documents 2048 --layout document_zigzag
    """
    for option, value in (("--memory-gib", memory_gib), ("--exact-up-to", exact_up_to)):
        o.check_least(option, value, 0)
    o.check_least("--top", top, 1)
    asked = Request(
        o.topology_for(topology, ranks),
        work := model.workload(),
        memory_bytes=memory_gib * 2**30 or None,
        degrees=(ulysses_degree,) if ulysses_degree else None,
        exact_up_to=exact_up_to,
        **o.keeping(layers),
    )
    # refuses sequences that are too short
    make_layout(work.layout, asked.topology.size, work.seqlen, work.mask.cu_seqlens)
    answer(asked, o.hosts_added(topology, asked.topology), top, as_json)


def answer(asked: Request, added: int, top: int, as_json: bool) -> None:
    """Print the candidates, the reason for the choice and the config to paste.

    Args:
        added: hosts that the topology's file does not have.

    Raises:
        ValueError: if no plan fits the memory.
    """
    request = counted(asked)
    plans = all_plans(request)
    best = check_memory(plans[0], request)
    baseline = plain_ring(request)
    reason = why(best, baseline, request) + stand_in(request, asked) + other_layout(best, request)
    if as_json:
        typer.echo(json.dumps(to_json(plans[:top], baseline, reason, asked, added), indent=2))
        return
    shown = table(plans[:top], baseline, asked, added)
    console = o.console_for(shown)
    console.print(shown)
    console.print(f"[bold]Chosen:[/bold] {reason}")
    typer.echo(block(best, asked))


def counted(request: Request) -> Request:
    """The request that is priced: under a window or documents, one that counts every message.

    On many ranks, some stand for all of them.

    Raises:
        NotImplementedError: for documents so long that those ranks would hold few of them.
    """
    mask, size = request.workload.mask, request.topology.size
    all_routes = EXACT_UP_TO if mask.cu_seqlens is not None else request.exact_up_to
    if not mask.is_near or size <= all_routes:
        return request
    if part := on_fewer_ranks(request):
        return part
    if size <= NEAR_UP_TO:
        return on_few(request)
    if mask.cu_seqlens is not None:
        raise NotImplementedError(
            f"on {size} ranks documents are predicted if a few ranks hold several of them, at most "
            f"{NEAR_UP_TO} ranks eight: give shorter --documents, fewer --ranks or none"
        )
    return request


def plain_ring(request: Request) -> Plan:
    """Ring Attention, with which every plan is compared."""
    ring = in_rank_order({"name": "ring"}, request.topology.size)
    return price_plan(request, 1, ring, ring)


def beside_ring(plans: list[Plan], ring: Plan) -> list[Plan]:
    """The plans, followed by the plain ring if it is not among them."""
    return plans if ring.choice in [plan.choice for plan in plans] else [*plans, ring]


def stand_in(request: Request, asked: Request) -> str:
    """What the reason says if some ranks were counted in place of all."""
    some, every = request.topology.size, asked.topology.size
    return "" if some == every else f". {some} ranks stand for all {every}"


def block(plan: Plan, request: Request) -> str:
    """The config of a plan, to be pasted."""
    return (
        'The "wallfacer" block of a DeepSpeed JSON, or SequenceParallelConfig.from_dict:\n'
        + json.dumps(config(plan, request), indent=2)
    )


def config(plan: Plan, request: Request) -> dict[str, Any]:
    """The config that runs a plan, with the kernel if one was asked for by name."""
    work = request.workload
    words = plan.to_config(request.topology.size, work.layout)
    return words if work.kernel == AUTO else words | {"kernel": work.kernel}


def why(best: Plan, baseline: Plan, request: Request) -> str:
    """The choice in one sentence, beside the plain ring."""
    cost, ring = best.cost, baseline.cost
    kept = f", {best.layers} layers keeping what they gather" if best.keep else ""
    order = "" if best.in_rank_order else ", ranks placed in another order than their numbers"
    exact = request.topology.size <= request.exact_up_to
    counted = "message by message" if exact else "by formulas"
    link, sent, rings = "NIC", cost.nic_bytes, ring.nic_bytes
    if request.topology.hosts == 1:
        link, sent, rings = "rank's link", cost.inside_bytes, ring.inside_bytes
    return (
        f"ulysses_degree {best.split}, forward {best.forward.placed}, backward "
        f"{best.backward.placed} with the {best.moves} walking{order}{kept}: "
        f"{o.milliseconds(cost.seconds)} ms predicted, "
        f"{ring.seconds / cost.seconds:.2f} x the ring's speed; "
        f"{sent / 1e9:.3g} GB through the busiest {link} against {rings / 1e9:.3g}"
        f"{hidden(best)} (counted {counted})"
    )


def hidden(plan: Plan) -> str:
    """What the reason says of hidden transfers; empty if nothing is transferred."""
    cost = plan.cost
    if not cost.nic_bytes + cost.inside_bytes:
        return ""
    exposed, moving = cost.exposed_s, max(cost.exposed_s, cost.transfer_s)
    return f", {1 - exposed / moving:.0%} of the transfer time hidden behind computing"


def other_layout(best: Plan, request: Request) -> str:
    """What the reason says if contiguous shards are faster under a sliding window."""
    work = request.workload
    if work.mask.band.left == inf or work.layout == "contiguous":
        return ""
    plain = best_plan(replace(request, workload=replace(work, layout="contiguous")))
    if plain.cost.seconds >= best.cost.seconds:
        return ""
    return (
        f'. Under this window "layout": "contiguous" is faster, {1e3 * plain.cost.seconds:.4g} ms '
        "predicted: add --layout contiguous"
    )


def table(plans: list[Plan], baseline: Plan, request: Request, added: int) -> Table:
    """The candidates, fastest first, and below them the ring that they are compared with.

    Args:
        added: hosts that the topology's file does not have.
    """
    cluster = request.topology
    found = Table(
        title=f"{escape(cluster.name)}: {cluster.hosts} hosts x {cluster.ranks_per_host} ranks, "
        f"{cluster.nics_per_host} NICs a host{o.added_words(added)}; forward and backward"
    )
    for name in ("predicted ms", "x ring", "exposed ms", "NIC GB", "inside GB", "memory MiB"):
        found.add_column(name, justify="right")
    add_plan_columns(found)
    for plan in beside_ring(plans, baseline):
        cost = plan.cost
        over = cost.memory_bytes > request.memory_limit
        found.add_row(
            o.milliseconds(cost.seconds),
            f"{baseline.cost.seconds / cost.seconds:.2f}",
            o.milliseconds(cost.exposed_s),
            f"{cost.nic_bytes / 1e9:.3g}",
            f"{cost.inside_bytes / 1e9:.3g}",
            f"{cost.memory_bytes / 2**20:.4g}{' too much' if over else ''}",
            *plan_cells(plan),
            style="dim" if over else None,
        )
    return found


def add_plan_columns(table: Table) -> None:
    """The columns of `plan_cells`; "u" is the head split."""
    table.add_column("u", justify="right")
    for name in ("forward", "backward", "walks"):
        table.add_column(name)


def plan_cells(plan: Plan) -> tuple[str, ...]:
    """What a plan runs, for a row of a table."""
    walks = plan.moves + (", kept" if plan.keep else "")
    return plan.split, str(plan.forward.placed), str(plan.backward.placed), walks


def to_json(
    plans: list[Plan], ring: Plan, reason: str, request: Request, added: int
) -> dict[str, Any]:
    """The same as data; `config` is what a DeepSpeed block or SequenceParallelConfig takes."""
    return {
        "topology": request.topology.to_dict(),
        "hosts_added": added,
        "reason": reason,
        "plans": [plan_words(plan, request) for plan in plans],
        "ring": plan_words(ring, request),
    }


def plan_words(plan: Plan, request: Request) -> dict[str, Any]:
    """One candidate as data."""
    cost = plan.cost
    return {
        "config": config(plan, request),
        "in_rank_order": plan.in_rank_order,
        "forward": str(plan.forward.placed),
        "backward": str(plan.backward.placed),
        "predicted_s": cost.seconds,
        "compute_s": cost.compute_s,
        "exposed_s": cost.exposed_s,
        "nic_bytes": cost.nic_bytes,
        "inside_bytes": cost.inside_bytes,
        "memory_bytes": cost.memory_bytes,
        "fits_memory": cost.memory_bytes <= request.memory_limit,
    }
