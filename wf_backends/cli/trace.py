"""A Chrome trace of plans: what every rank did, beside what was predicted.

Open it in chrome://tracing or ui.perfetto.dev: one process for the prediction and one for each
rank, with a track for computing and one for transfers (of a rank: for waiting for them).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from wf_backends.planner import Plan, Span
from wf_backends.runtime import SPAN

WHOLE = f"{SPAN}all"
TRACKS = ("compute", "transfer", "wait")


def record(work: Callable[[], object]) -> list[Span]:
    """What this rank does in `work`, in seconds from its start: computing, and waiting.

    On a GPU these are the times of the host, which runs ahead of the device.
    """
    with profile(activities=[ProfilerActivity.CPU]) as found, record_function(WHOLE):
        work()
    events = list(found.events() or ())
    (start,) = (event.time_range.start for event in events if event.name == WHOLE)
    return [
        Span(
            label=event.name.removeprefix(SPAN).partition(" ")[2],
            kind=event.name.removeprefix(SPAN).partition(" ")[0],
            start=(event.time_range.start - start) / 1e6,
            stop=(event.time_range.end - start) / 1e6,
        )
        for event in events
        if event.name.startswith(SPAN) and event.name != WHOLE
    ]


def from_all_ranks(mine: list[Span]) -> list[list[Span]]:
    """The spans of every rank, on every rank."""
    if not dist.is_initialized():
        return [mine]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [asdict(span) for span in mine])
    return [[Span(**words) for words in rank] for rank in gathered]


def write(path: Path, plans: Sequence[Plan], measured: Sequence[list[list[Span]]]) -> None:
    """Write the trace of some plans: the rank that is predicted to end last, and all ranks.

    Args:
        measured: for every plan the spans of every rank.
    """
    events: list[dict[str, Any]] = []
    for plan, ranks in zip(plans, measured, strict=True):
        walks = f"{plan.moves} walk" + (", kept" if plan.keep else "")
        name = f"u={plan.split} {plan.forward.placed} / {plan.backward.placed}, {walks}"
        for title, found in [("predicted", plan.cost.spans), *enumerate(ranks)]:
            who = title if isinstance(title, str) else f"rank {title}"
            number = len({event["pid"] for event in events})
            events += _process(number, f"{name}: {who}", found)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _process(number: int, name: str, found: Iterable[Span]) -> list[dict[str, Any]]:
    """The events of one process: its name, its tracks, its spans."""
    at = {"pid": number, "ph": "M"}
    events: list[dict[str, Any]] = [at | {"name": "process_name", "args": {"name": name}}]
    for track, kind in enumerate(TRACKS):
        events.append(at | {"name": "thread_name", "tid": track, "args": {"name": kind}})
    for span in found:
        events.append(
            {
                "name": span.label,
                "cat": span.kind,
                "ph": "X",
                "pid": number,
                "tid": TRACKS.index(span.kind),
                "ts": 1e6 * span.start,
                "dur": 1e6 * (span.stop - span.start),
            }
        )
    return events
