"""A schedule as text. Pure: standard library only."""

from __future__ import annotations

from wf_backends.schedule.ranges import join
from wf_backends.schedule.schedule import Schedule, Shards


def render(schedule: Schedule) -> str:
    """The step x rank grid: which key shards meet which query shards, where and when."""
    held = schedule.holdings()
    head = ["rank", "queries", *(f"step {step}" for step in range(schedule.num_steps))]
    rows = [
        [str(rank), _names(schedule.q[rank]), *(_names(keys[rank]) for keys in held)]
        for rank in range(schedule.num_ranks)
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join(lines)


def _names(shards: Shards) -> str:
    """Shard numbers, runs shortened: (0, 1, 2, 3, 6) -> "0-3,6"."""
    runs = join((shard, shard + 1) for shard in shards)
    return ",".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in runs) or "-"
