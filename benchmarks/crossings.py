"""How often a row crosses between hosts, on every route and mask; computed, nothing is sent.

    python benchmarks/crossings.py --hosts 4 --ranks 4

A cell has two ratios, forward / backward: bytes that cross between hosts / the minimum. At the
minimum each row crosses once to each host that reads it, and its partial result crosses once from
each host. Keys stay on an all-gather, queries stay on other routes. "once": the route has
"host_size".
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from bytes import random_documents
from measure import print_head, print_row

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

SHARD_ROWS = 64
SHAPE = Shape(batch=1, heads=8, kv_heads=8, head_dim=64, itemsize=2)


class Sent(NamedTuple):
    """Rows that one rank sends to another; `rows` are positions in the sequence."""

    source: int
    target: int
    side: str  # "walk" or "stay", the side of the schedule that they belong to
    is_partial: bool  # partial results, which go to an owner; otherwise q, k or v
    row_bytes: int
    rows: Ranges


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
        "window of 2 shards": (Mask(Band(2 * SHARD_ROWS, 0)), "zigzag"),
        "documents": (Mask(CAUSAL, random_documents(tokens, SHARD_ROWS)), "document_zigzag"),
        "shared question": (shared, "balanced"),
    }


def routes(hosts: int, per_host: int) -> Iterator[dict[str, Any]]:
    """The routes of the table; routes that gather over several hosts also with "host_size"."""
    num_ranks = hosts * per_host
    yield {"name": "ring"}
    yield {"name": "double_ring", "inner": per_host}
    yield {"name": "mesh", "rows": per_host, "cols": hosts}
    for team in (2, 4):
        if num_ranks % team**2 == 0:
            yield {"name": "concentric", "team_size": team}
            if team < per_host:  # then this order has sub-rings inside a host
                yield {"name": "concentric", "team_size": team, "order": [0, 2, 1]}
    over_hosts: list[dict[str, Any]] = [
        {"name": "mesh", "rows": num_ranks // cols, "cols": cols} for cols in (2, 1) if cols < hosts
    ]
    for route in (*over_hosts, {"name": "all_gather"}):
        yield route
        yield {**route, "host_size": per_host}


def messages(problem: Problem, row_bytes: RowBytes) -> Iterator[Sent]:
    """Every message that any rank sends in a pass."""
    walk, stay = row_bytes.walk, row_bytes.stay
    reads = Reads(problem)
    forwarding = Forwarding(reads, problem.kept)
    for rank in range(problem.schedule.num_ranks):
        program = lower(problem, rank)
        stay_shard, walk_shard = reads.stay_layout[rank], reads.walk_layout[rank]
        stay_rows = reads.stay_rows(rank)
        # (parcels, the rows that their ranges count in, side, partial results?, bytes of a row)
        sends = [(program.walk.send, walk_shard, "walk", False, walk.gathered)]
        for index, step in enumerate(program.steps):
            walkers = forwarding.held(index, rank)
            partials = (*step.partial.send, *step.reduce.send)
            sends.append((step.hop.send, walkers, "walk", False, walk.row))
            sends.append((step.owner.send, walk_shard, "walk", False, walk.row))
            sends.append((partials, walkers, "walk", True, walk.partial))
            for gather_round in step.rounds:
                sends.append((gather_round.fetch.send, stay_shard, "stay", False, stay.gathered))
                sends.append((gather_round.reduce.send, stay_rows, "stay", True, stay.partial))
        for parcels, local, side, is_partial, nbytes in sends:
            for parcel in parcels:
                rows = globalize(parcel.rows, local)
                yield Sent(rank, parcel.peer, side, is_partial, nbytes, rows)


def crossings(problem: Problem, row_bytes: RowBytes, per_host: int) -> str:
    """Bytes that cross between hosts / the minimum; "-" if no bytes cross."""
    crossed = 0
    minimum: dict[tuple[str, bool, int, int], int] = {}  # bytes of (side, is_partial, host, row)
    for sent in messages(problem, row_bytes):
        source_host, target_host = sent.source // per_host, sent.target // per_host
        if source_host == target_host:
            continue
        crossed += size(sent.rows) * sent.row_bytes
        host = source_host if sent.is_partial else target_host
        for start, stop in sent.rows:
            for row in range(start, stop):
                key = (sent.side, sent.is_partial, host, row)
                minimum[key] = max(sent.row_bytes, minimum.get(key, 0))
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
    num_ranks = args.hosts * args.ranks
    tokens = num_ranks * SHARD_ROWS
    columns = masks(tokens)
    print_head("route", *columns)
    for route in routes(args.hosts, args.ranks):
        placed = read_placed(route, num_ranks)
        schedule = place(placed, num_ranks)
        cells: list[str] = []
        for mask, layout_name in columns.values():
            borders = mask.cu_seqlens or (0, tokens)
            layout = make_layout(layout_name, num_ranks, tokens, borders, mask.slices)
            ratios: list[str] = []
            for kind in pass_kinds(placed):
                problem = Problem(
                    schedule, layout, layout, mask, kind.queries_walk, host_size=placed.host_size
                )
                ratios.append(crossings(problem, kind.row_bytes(SHAPE), args.ranks))
            cells.append(" / ".join(ratios))
        print_row(placed, *cells)


if __name__ == "__main__":
    main()
