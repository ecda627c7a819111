"""How often a row crosses between hosts, on every route and mask; computed, no messages are sent.

    python benchmarks/crossings.py --hosts 4 --ranks 4

Ratio of bytes that cross between hosts to the minimum; forward / backward. The minimum: each row
crosses once to each host that reads it, and its partial result once from each host. Keys stay on an
all-gather, queries on other routes. "once": with "host_size" in the route.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bytes import random_documents

from wf_backends.cost.workload import BACKWARD_KEYS, BACKWARD_QUERIES, FORWARD, PassKind
from wf_backends.lowering import Problem, RowBytes, Shape, lower
from wf_backends.lowering.forwarding import Forwarding
from wf_backends.lowering.problem import Reads
from wf_backends.schedule import (
    CAUSAL,
    Band,
    Mask,
    Placed,
    Ranges,
    globalize,
    make_layout,
    make_mask,
    place,
    read_placed,
    size,
)

ROWS = 64  # of a rank
SHAPE = Shape(batch=1, heads=8, kv_heads=8, head_dim=64, itemsize=2)
Sent = tuple[int, int, str, int, Ranges]  # from, to, kind, bytes of a row, positions of the rows


def masks(tokens: int) -> dict[str, tuple[Mask, str]]:
    """Masks by name, each with the name of its layout."""
    quarters = [(0, tokens // 8), (tokens // 8, tokens // 4), (tokens // 4, tokens // 2)]
    quarters.append((tokens // 2, tokens))
    shared = make_mask(
        q_ranges=[(0, tokens), *quarters[1:]],
        k_ranges=quarters,
        attn_mask_types=["full", "causal", "causal", "causal"],
    )
    return {
        "full": (Mask(), "zigzag"),
        "causal": (Mask(CAUSAL), "zigzag"),
        "window of 2 shards": (Mask(Band(2 * ROWS, 0)), "zigzag"),
        "documents": (Mask(CAUSAL, random_documents(tokens, ROWS)), "document_zigzag"),
        "shared question": (shared, "balanced"),
    }


def routes(hosts: int, per_host: int) -> Iterator[dict[str, Any]]:
    """The routes of the table; routes that gather over several hosts also with "host_size"."""
    n = hosts * per_host
    yield {"name": "ring"}
    yield {"name": "double_ring", "inner": per_host}
    yield {"name": "mesh", "rows": per_host, "cols": hosts}
    for team in (team for team in (2, 4) if n % team**2 == 0):
        yield {"name": "concentric", "team_size": team}
        if team < per_host:  # its sub-rings lie inside a host
            yield {"name": "concentric", "team_size": team, "order": [0, 2, 1]}
    over_hosts = [
        {"name": "mesh", "rows": n // cols, "cols": cols} for cols in (2, 1) if cols < hosts
    ]
    for route in (*over_hosts, {"name": "all_gather"}):
        yield route
        yield {**route, "host_size": per_host}


def messages(problem: Problem, rows: RowBytes) -> Iterator[Sent]:
    """Every message that any rank sends in a pass."""
    reads = Reads(problem)
    forwarding = Forwarding(reads, problem.kept)
    for rank in range(problem.schedule.num_ranks):
        program = lower(problem, rank)
        stays, walks = reads.stay_layout[rank], reads.walk_layout[rank]
        held = reads.stay_rows(rank)
        parts = [(program.walk.send, walks, "walk", rows.walk.gathered)]
        for index, step in enumerate(program.steps):
            walkers = forwarding.held(index, rank)
            parts += [
                (step.hop_out, walkers, "walk", rows.walk.row),
                (step.owner_out, walks, "walk", rows.walk.row),
            ]
            partials = *step.partial_out, *step.home_out
            parts.append((partials, walkers, "walk found", rows.walk.partial))
            for gather_round in step.rounds:
                parts.append((gather_round.fetch.send, stays, "stay", rows.stay.gathered))
                parts.append((gather_round.home.send, held, "stay found", rows.stay.partial))
        for parcels, local, kind, row_bytes in parts:
            for parcel in parcels:
                yield rank, parcel.peer, kind, row_bytes, globalize(parcel.rows, local)


def crossings(problem: Problem, rows: RowBytes, per_host: int) -> str:
    """Bytes that cross between hosts / the minimum; "-" if no bytes cross."""
    crossed = 0
    minimum: dict[tuple[str, int, int], int] = {}  # bytes of (kind, host, row)
    for source, target, kind, row_bytes, ranges in messages(problem, rows):
        source_host, target_host = source // per_host, target // per_host
        if source_host == target_host:
            continue
        crossed += size(ranges) * row_bytes
        host = source_host if "found" in kind else target_host  # partial results leave a host
        for start, stop in ranges:
            for row in range(start, stop):
                key = (kind, host, row)
                minimum[key] = max(row_bytes, minimum.get(key, 0))
    return f"{crossed / sum(minimum.values()):.2f}" if minimum else "-"


def pass_kinds(placed: Placed) -> tuple[PassKind, PassKind]:
    """The forward and the backward; keys stay on an all-gather, queries on other routes."""
    if placed.keys_stay:
        return replace(FORWARD, queries_walk=True), BACKWARD_QUERIES
    return FORWARD, BACKWARD_KEYS


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=4, help="of a host")
    args = parser.parse_args()
    n = args.hosts * args.ranks
    columns = masks(n * ROWS)
    print(f"| route | {' | '.join(columns)} |\n{'|---' * (1 + len(columns))}|")
    for route in routes(args.hosts, args.ranks):
        placed = read_placed(route, n)
        cells: list[str] = []
        for mask, layout_name in columns.values():
            borders = mask.cu_seqlens or (0, n * ROWS)
            layout = make_layout(layout_name, n, n * ROWS, borders, mask.slices)
            schedule, ratios = place(placed, n), list[str]()
            for kind in pass_kinds(placed):
                problem = Problem(
                    schedule, layout, layout, mask, kind.queries_walk, host_size=placed.host_size
                )
                ratios.append(crossings(problem, kind.row_bytes(SHAPE), args.ranks))
            cells.append(" / ".join(ratios))
        print(f"| {placed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
