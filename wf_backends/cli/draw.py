"""Pictures: a schedule and its hops between hosts, and the memory of a forward pass."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from wf_backends.autochunk import Profiles
from wf_backends.cli.options import check_file
from wf_backends.cluster import Topology
from wf_backends.schedule import Schedule

PICTURES = (".png", ".svg", ".pdf")


def check_picture(path: Path | None) -> Path | None:
    """The path; refuses, before any work, a path where no picture can be drawn or written."""
    check_file("--picture", path, PICTURES)
    if path is not None and find_spec("matplotlib") is None:
        raise ValueError(
            "--picture needs matplotlib, which is missing: pip install 'wallfacer[cli]'"
        )
    return path


Picture = Annotated[
    Path | None,
    Option(callback=check_picture, help="Draw a picture to this file: .png, .svg or .pdf."),
]


def draw(schedule: Schedule, cluster: Topology, path: Path, title: str) -> None:
    """Write a picture of the schedule; the file's ending is the format."""
    figure = new_figure((12, 5.5), title)
    grid, hosts = figure.subplots(1, 2)
    _draw_meetings(grid, schedule)
    _draw_host_map(hosts, schedule, cluster)
    figure.savefig(path, dpi=150)


def draw_memory(profiles: Profiles, limit: float | None, path: Path, title: str) -> None:
    """Write a picture of the live bytes at each operator, and of the budget `limit` in bytes."""
    figure = new_figure((9, 4), title)
    axes = figure.subplots()
    for profile, label in ((profiles.before, "as it is"), (profiles.after, "in slices")):
        x = [i / max(1, len(profile) - 1) for i in range(len(profile))]
        axes.step(x, [nbytes / 2**30 for _, nbytes in profile], where="mid", label=label)
    if limit is not None:
        axes.axhline(limit / 2**30, color="gray", linestyle="--", label="budget")
    axes.set(xlabel="the operators, in order", ylabel="live activations, GiB", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)


def new_figure(size: tuple[float, float], title: str) -> Any:
    """An empty figure with a title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    return figure


def _draw_meetings(axes: Any, schedule: Schedule) -> None:
    """Draw query shards against key shards: the colour is the step, the number the rank."""
    n = schedule.num_ranks
    steps = [[0] * n for _ in range(n)]
    for step, held in enumerate(schedule.holdings()):
        for rank, keys in enumerate(held):
            for query in schedule.q[rank]:
                for key in keys:
                    steps[query][key] = step
                    if n <= 16:
                        axes.text(key, query, rank, ha="center", va="center", fontsize=8)
    image = axes.imshow(steps, cmap="Pastel1" if schedule.num_steps <= 9 else "viridis")
    ticks = range(schedule.num_steps) if schedule.num_steps <= 16 else None
    axes.figure.colorbar(image, ax=axes, label="step", shrink=0.8, ticks=ticks)
    axes.set(xlabel="key shard", ylabel="query shard", title="who meets whom (number: rank)")


def _draw_host_map(axes: Any, schedule: Schedule, cluster: Topology) -> None:
    """Draw a line of ranks for each host, and an arrow for each distinct hop, red between hosts."""
    width = cluster.ranks_per_host
    positions = [(rank % width, -(rank // width)) for rank in range(schedule.num_ranks)]
    for host in range(cluster.hosts):
        axes.fill_between((-0.4, width - 0.6), -host - 0.3, -host + 0.3, fc="#f2f2f2", ec="#888888")
        axes.text(-0.9, -host, f"host {host}", ha="right", va="center", fontsize=8)
    for rank, position in enumerate(positions):
        axes.text(*position, rank, ha="center", va="center", fontsize=9, zorder=3)
    for hop in dict.fromkeys(schedule.hops):
        for source, target in enumerate(hop):
            if source != target:
                inside = cluster.host(source) == cluster.host(target)
                color = "#4477aa" if inside else "#cc3311"
                arrow = {"arrowstyle": "->", "connectionstyle": "arc3,rad=0.25", "color": color}
                arrow |= {"shrinkA": 8, "shrinkB": 8, "alpha": 0.7}
                axes.annotate("", positions[target], positions[source], arrowprops=arrow)
    axes.set(xlim=(-2, width), ylim=(-cluster.hosts + 0.3, 0.7), title="hops (red: between hosts)")
    axes.axis("off")
