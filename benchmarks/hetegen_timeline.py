"""The picture of HeteGen's lanes in docs/hetegen.md, in virtual time.

    python benchmarks/hetegen_timeline.py

Two tokens of a model of six equal linears, with accelerator memory for a third of them, and a host
that is three times as fast as the link. A second panel shows the same model with streaming alone.
"""

from __future__ import annotations

import argparse
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from wf_backends.hetegen import Rates  # noqa: E402
from wf_backends.hetegen.weights.jobs import simulate  # noqa: E402
from wf_backends.hetegen.weights.plan import LANE_NAMES, Linear, Request  # noqa: E402
from wf_backends.hetegen.weights.planning import make_plan  # noqa: E402

NUM_LINEARS = 6
WARM_UP_PASSES, SHOWN_PASSES = 2, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/hetegen_lanes.png"))
    out = parser.parse_args().out
    figure, panels = plt.subplots(2, 1, figsize=(11, 5), sharex=True, layout="constrained")
    linears = tuple(Linear(f"{i}", 4096, 4096, 2) for i in range(NUM_LINEARS))
    memory = sum(linear.nbytes for linear in linears) // 3
    for axes, (title, alpha) in zip(panels, (("HeteGen", None), ("streaming", 0.0)), strict=True):
        request = Request(linears, Rates(25e9, 75e9, 200e9), memory, alpha=alpha)
        draw(axes, title, request)
    panels[-1].set_xlabel("milliseconds; a colour is a linear, a line the end of a token")
    figure.savefig(out, dpi=110)


def draw(axes: Axes, title: str, request: Request) -> None:
    """Draw the lanes in the last SHOWN_PASSES passes; time 0 is the end of the warm-up."""
    plan = make_plan(request)
    pass_seconds, device = simulate(plan, ["decode"] * (WARM_UP_PASSES + SHOWN_PASSES))
    start = sum(pass_seconds[:WARM_UP_PASSES])
    for timed in device.timed_jobs:
        if timed.end > start:
            lane = LANE_NAMES.index(timed.job.lane)
            span_ms = 1e3 * (timed.start - start), 1e3 * (timed.end - timed.start)
            color = f"C{timed.job.linear}"
            axes.broken_barh([span_ms], (lane - 0.35, 0.7), color=color, edgecolor="white", lw=0.4)
    for end in accumulate(pass_seconds[WARM_UP_PASSES:]):
        axes.axvline(1e3 * end, color="black", linewidth=1)
    axes.set_yticks(range(3), LANE_NAMES)
    axes.set_xlim(left=0)
    alpha = plan.splits[0].alpha("decode")
    axes.set_title(
        f"{title}: alpha {alpha:.2f}, {1e3 * pass_seconds[-1]:.2f} ms a token", loc="left"
    )


if __name__ == "__main__":
    main()
