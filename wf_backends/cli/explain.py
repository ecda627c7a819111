"""`wallfacer explain`: a route as a grid, as a timeline and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from wf_backends import planner
from wf_backends._validation import one_of
from wf_backends.cli import options as o
from wf_backends.cli.draw import Picture, draw
from wf_backends.cluster import PRESETS, load_extended
from wf_backends.config import check_host_size, parse_route
from wf_backends.schedule import excess, make_layout, place, render, segments_of

PRESET_RANKS = 8  # of a preset by default: a larger grid is hard to read
MAX_RANKS = 256  # counting their messages takes some 25 s, and eight times as long for 512 ranks
MAX_SLICES = 12  # of a mask that are listed
AXIS_WIDTH = 32  # characters of the time axis: the table fits 80 columns
MARKS = {(False, False): " ", (True, False): "#", (False, True): "-", (True, True): "+"}


@o.describes_model()
def explain(
    route: Annotated[
        str,
        Argument(
            help="ring, all_gather, double_ring:inner=4, concentric:team_size=2, "
            "mesh:rows=2,cols=4; placement: ,order=1-0; for routes that gather ,host_size=4: rows "
            "cross to a host once"
        ),
    ],
    model: o.Model,
    topology: o.TopologyName = "h100-8x400g",
    ranks: Annotated[
        int | None,
        Option(help=f"Ranks; 0 = all. Default: {PRESET_RANKS} of a preset, all of a file."),
    ] = None,
    moves: Annotated[str, Option(help="What moves in the backward: keys or queries.")] = "keys",
    picture: Picture = None,
) -> None:
    """Show who meets whom, what every step costs, and how hops cross between hosts.

    Examples:

        wallfacer explain concentric:team_size=2 --ranks 8

        wallfacer explain mesh:rows=2,cols=4,order=1-0 --ranks 8 --picture mesh.png

        wallfacer explain ring --ranks 8 --seqlen 65536 --mask mask.json --layout balanced
    """
    one_of("--moves", moves, planner.MOVES)
    if ranks is None:
        ranks = PRESET_RANKS if topology in PRESETS else 0
    o.check_range(0, ranks=ranks)
    cluster, added = load_extended(topology, ranks)
    if cluster.size > MAX_RANKS:
        raise ValueError(
            f"--ranks must be at most {MAX_RANKS}, all of which are shown, got {cluster.size}"
        )
    placed = parse_route("--route", route, cluster.size)
    check_host_size(placed, cluster.size, moves, "--moves")
    workload = model.workload()
    request = planner.Request(cluster, workload, exact_up_to=cluster.size)
    plan = planner.price_plan(request, planner.Choice(1, placed, placed, moves))
    if picture is not None:
        draw(place(placed, cluster.size), cluster, picture, f"{route}, {cluster.size} ranks")
        print(f"drawn: {picture}")
    show(plan, cluster.size, added)
    if workload.mask.slices is not None:
        print("\n".join(mask_lines(workload, cluster.size)))


def show(plan: planner.Plan, size: int, added: int) -> None:
    """Print the grid and the timelines of both passes; `added`: hosts that the file lacks."""
    placed, console = plan.choice.forward, Console()
    console.print(f"[bold]{placed}[/bold] on {size} ranks{o.added_hosts_note(added)}\n")
    print(render(place(placed, size)))
    for name, cost in (("forward", plan.forward), ("backward", plan.backward)):
        console.print(timeline(cost, name))


def timeline(cost: planner.Cost, name: str) -> Table:
    """Each phase of a pass on one time axis: computing and transfers of the rank that ends last."""
    table = Table(title=f"{name}: {planner.milliseconds(cost.seconds)} ms predicted")
    table.add_column("phase", no_wrap=True)
    for column in ("compute ms", "transfer ms"):
        table.add_column(column, justify="right")
    table.add_column("compute #  transfer -  both +", min_width=AXIS_WIDTH, no_wrap=True)
    for label in dict.fromkeys(span.label for span in cost.spans):
        spans = [span for span in cost.spans if span.label == label]
        times = [
            planner.milliseconds(sum(span.stop - span.start for span in spans if span.kind == kind))
            for kind in ("compute", "transfer")
        ]
        table.add_row(label, *times, bar(spans, max(cost.seconds, 1e-12)))
    return table


def bar(spans: Sequence[planner.Span], total: float) -> str:
    """The time axis of a phase, of `total` seconds: # computes, - transfers, + both, in a part."""
    busy = {"compute": set[int](), "transfer": set[int]()}
    for span in spans:
        start, stop = (round(AXIS_WIDTH * time / total, 6) for time in (span.start, span.stop))
        busy[span.kind].update(range(floor(start), ceil(stop)))
    marks = [MARKS[i in busy["compute"], i in busy["transfer"]] for i in range(AXIS_WIDTH)]
    return "".join(marks).rstrip()


def mask_lines(workload: planner.Workload, size: int) -> list[str]:
    """Lines about a mask of slices, and about its layout on `size` ranks."""
    slices, seqlen = workload.mask.slices or (), workload.seqlen
    share = f"{workload.scores / seqlen**2:.1%} of all pairs of {seqlen:,} tokens"
    more = [f"  and {len(slices) - MAX_SLICES} more"] if len(slices) > MAX_SLICES else []
    layout = make_layout(workload.layout, size, seqlen, None, slices)
    most = excess(layout, segments_of(slices, seqlen))
    return [
        f"mask: {len(slices)} slices, {share}",
        *(f"  {mask_slice}" for mask_slice in slices[:MAX_SLICES]),
        *more,
        f"layout {workload.layout}: the busiest rank has {most:.1%} more than the mean, of the "
        "scores or of the tokens",
    ]
