"""`wallfacer explain`: one route as a grid, as a timeline, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wf_backends._validation import one_of
from wf_backends.cli import options as o
from wf_backends.cli.draw import check_picture, draw
from wf_backends.cluster import PRESETS, extended
from wf_backends.config import check_host_size, parse_route
from wf_backends.planner import (
    MOVES,
    Choice,
    Cost,
    Plan,
    Request,
    Span,
    Workload,
    milliseconds,
    price_plan,
)
from wf_backends.schedule import make_layout, place, render, slices_load

RANKS = 8  # of a preset: a grid of more is hard to read
MOST_RANKS = 256  # their messages are counted in some 25 s, eight times as long for twice as many
SHOWN = 12  # slices of a mask that are listed
WIDTH = 36  # characters of the time axis: with it the table fits 80 columns


@o.describes_model(heads=32, kv_heads=0, head_dim=128, seqlen=131072)
def explain(
    route: Annotated[
        str,
        typer.Argument(
            help="ring, all_gather, double_ring:inner=4, concentric:team_size=2, "
            "mesh:rows=2,cols=4; placed with ,order=1-0 and ,reverse=true; those that gather with "
            ",host_size=4: rows cross to a host once"
        ),
    ],
    model: o.Model,
    topology: o.TopologyName = "h100-8x400g",
    ranks: Annotated[
        int | None,
        typer.Option(
            help=f"Ranks of one sequence; 0 = all of the topology. Not given: {RANKS} of a preset, "
            "all of a file.",
            show_default=False,
        ),
    ] = None,
    moves: Annotated[str, typer.Option(help="Which side walks back: keys or queries.")] = "keys",
    picture: Annotated[
        Path | None, typer.Option(help="Draw who meets whom here: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Show who meets whom, what every step costs, and where the rings run on the hosts.

    Examples:

        wallfacer explain concentric:team_size=2 --ranks 8

        wallfacer explain mesh:rows=2,cols=4,order=1-0 --ranks 8 --picture mesh.png

        wallfacer explain ring --ranks 8 --seqlen 65536 --mask mask.json --layout balanced
    """
    one_of("--moves", moves, MOVES)
    check_picture(picture)
    if ranks is None:
        ranks = RANKS if topology in PRESETS else 0
    o.check_range(0, ranks=ranks)
    cluster, added = extended(topology, ranks)
    if cluster.size > MOST_RANKS:
        raise ValueError(
            f"--ranks must be at most {MOST_RANKS}, all of which are shown, got {cluster.size}"
        )
    placed = parse_route("--route", route, cluster.size)
    check_host_size(placed, cluster.size, moves, "--moves")
    request = Request(cluster, work := model.workload(), exact_up_to=cluster.size)
    plan = price_plan(request, Choice(1, placed, placed, moves))
    show(plan, cluster.size, added)
    if work.mask.slices is not None:
        typer.echo("\n".join(mask_lines(work, cluster.size)))
    if picture is not None:
        title = f"{route}, {cluster.size} ranks"
        draw(place(placed, cluster.size), cluster, picture, title=title)
        Console().print(escape(f"drawn: {picture}"))


def show(plan: Plan, size: int, added: int) -> None:
    """Print the grid, and the timelines of both passes.

    Args:
        added: hosts that the topology's file does not have.
    """
    placed, console = plan.choice.forward, Console()
    console.print(f"[bold]{placed}[/bold] on {size} ranks{o.added_words(added)}\n")
    typer.echo(render(place(placed, size)))
    for name, cost in (("forward", plan.forward), ("backward", plan.backward)):
        console.print(timeline(cost, name))


def timeline(cost: Cost, name: str) -> Table:
    """Every phase on one time axis: what the rank that ends last computes, sends and receives."""
    found = Table(title=f"{name}: {milliseconds(cost.seconds)} ms predicted")
    found.add_column("phase", no_wrap=True)
    for column in ("compute ms", "transfer ms"):
        found.add_column(column, justify="right")
    found.add_column("compute #  transfer -  both +", min_width=WIDTH, no_wrap=True)
    for label in dict.fromkeys(span.label for span in cost.spans):
        spans = [span for span in cost.spans if span.label == label]
        took = [_seconds(spans, kind) for kind in ("compute", "transfer")]
        line = bar(spans, max(cost.seconds, 1e-12))
        found.add_row(label, *map(milliseconds, took), line)
    return found


def _seconds(spans: Sequence[Span], kind: str) -> float:
    return sum(span.stop - span.start for span in spans if span.kind == kind)


def bar(spans: Sequence[Span], total: float) -> str:
    """When something of a phase goes on, as one line of characters."""
    seen = [set[str]() for _ in range(WIDTH)]
    for span in spans:
        first, stop = (round(WIDTH * at / total) for at in (span.start, span.stop))
        for column in seen[first:stop]:
            column.add(span.kind)
    marks = {(): " ", ("compute",): "#", ("transfer",): "-", ("compute", "transfer"): "+"}
    return "".join(marks[tuple(sorted(kinds))] for kinds in seen).rstrip()


def mask_lines(work: Workload, size: int) -> list[str]:
    """What `explain` says of a mask in slices, and of its cut for so many ranks."""
    slices = work.mask.slices or ()
    share = f"{work.scores / work.seqlen**2:.1%} of all pairs of {work.seqlen:,} tokens"
    more = [f"  and {len(slices) - SHOWN} more"] if len(slices) > SHOWN else []
    layout = make_layout(work.layout, size, work.seqlen, None, slices)
    excess = slices_load(slices, work.seqlen).unevenness(layout)
    return [
        f"mask: {len(slices)} slices, {share}",
        *(f"  {one}" for one in slices[:SHOWN]),
        *more,
        f"layout {work.layout}: the busiest rank has {excess:.1%} more than the mean, of the "
        "scores or of the tokens",
    ]
