"""`wallfacer explain`: one route as a grid, as a timeline, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from wf_backends._validation import one_of
from wf_backends.cli import options as o
from wf_backends.cli.draw import Picture, draw
from wf_backends.cluster import PRESETS, load_extended
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


@o.describes_model()
def explain(
    route: Annotated[
        str,
        Argument(
            help="ring, all_gather, double_ring:inner=4, concentric:team_size=2, "
            "mesh:rows=2,cols=4; placed with ,order=1-0 and ,reverse=true; those that gather with "
            ",host_size=4: rows cross to a host once"
        ),
    ],
    model: o.Model,
    topology: o.TopologyName = "h100-8x400g",
    ranks: Annotated[
        int | None,
        Option(help=f"Ranks of one sequence; 0 = all. Else {RANKS} of a preset, all of a file."),
    ] = None,
    moves: Annotated[str, Option(help="Which side walks back: keys or queries.")] = "keys",
    picture: Picture = None,
) -> None:
    """Show who meets whom, what every step costs, and where the rings run on the hosts.

    Examples:

        wallfacer explain concentric:team_size=2 --ranks 8

        wallfacer explain mesh:rows=2,cols=4,order=1-0 --ranks 8 --picture mesh.png

        wallfacer explain ring --ranks 8 --seqlen 65536 --mask mask.json --layout balanced
    """
    one_of("--moves", moves, MOVES)
    if ranks is None:
        ranks = RANKS if topology in PRESETS else 0
    o.check_range(0, ranks=ranks)
    cluster, added = load_extended(topology, ranks)
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
        print("\n".join(mask_lines(work, cluster.size)))
    if picture is not None:
        draw(place(placed, cluster.size), cluster, picture, f"{route}, {cluster.size} ranks")
        print(f"drawn: {picture}")


def show(plan: Plan, size: int, added: int) -> None:
    """Print the grid, and the timelines of both passes; `added` hosts are not in the file."""
    placed, console = plan.choice.forward, Console()
    console.print(f"[bold]{placed}[/bold] on {size} ranks{o.added_words(added)}\n")
    print(render(place(placed, size)))
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
        took = [
            milliseconds(sum(span.stop - span.start for span in spans if span.kind == kind))
            for kind in ("compute", "transfer")
        ]
        found.add_row(label, *took, bar(spans, max(cost.seconds, 1e-12)))
    return found


def bar(spans: Sequence[Span], total: float) -> str:
    """When something of a phase goes on, as one line of characters."""
    busy = {"compute": set[int](), "transfer": set[int]()}
    for span in spans:
        first, stop = (round(WIDTH * at / total) for at in (span.start, span.stop))
        busy[span.kind].update(range(first, stop))
    marks = (" #-+"[(at in busy["compute"]) + 2 * (at in busy["transfer"])] for at in range(WIDTH))
    return "".join(marks).rstrip()


def mask_lines(work: Workload, size: int) -> list[str]:
    """What `explain` says of a mask in slices, and of its cut for so many ranks."""
    slices = work.mask.slices or ()
    share = f"{work.scores / work.seqlen**2:.1%} of all pairs of {work.seqlen:,} tokens"
    more = [f"  and {len(slices) - SHOWN} more"] if len(slices) > SHOWN else []
    layout = make_layout(work.layout, size, work.seqlen, None, slices)
    excess = slices_load(slices, work.seqlen).excess(layout)
    return [
        f"mask: {len(slices)} slices, {share}",
        *(f"  {one}" for one in slices[:SHOWN]),
        *more,
        f"layout {work.layout}: the busiest rank has {excess:.1%} more than the mean, of the "
        "scores or of the tokens",
    ]
