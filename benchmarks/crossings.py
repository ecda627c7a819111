"""How often a row crosses to a host that reads it, on every route and mask: messages are not run.

    python benchmarks/crossings.py --hosts 4 --ranks 4

Bytes that cross between hosts, over those of each row once to each host that reads it, and of its
partial results once from each host; forward / backward. 1.00: a row crosses once. Keys stay on an
all-gather, queries elsewhere. "once": with "host_size" in the route.
"""

from __future__ import annotations

import argparse
from collections import Counter
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
Sent = tuple[int, int, str, int, Ranges]  # from, to, what, bytes of a row, rows as positions


def masks(tokens: int) -> dict[str, tuple[Mask, str]]:
    """Masks by name, each with its layout."""
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
    """The routes of the table, those that gather over several hosts twice."""
    n = hosts * per_host
    yield {"name": "ring"}
    yield {"name": "double_ring", "inner": per_host}
    yield {"name": "mesh", "rows": per_host, "cols": hosts}
    for team in (t for t in (2, 4) if n % t**2 == 0):
        yield {"name": "concentric", "team_size": team}
        if team < per_host:  # its sub-rings lie inside a host
            yield {"name": "concentric", "team_size": team, "order": [0, 2, 1]}
    wide = [{"name": "mesh", "rows": n // cols, "cols": cols} for cols in (2, 1) if cols < hosts]
    for route in (*wide, {"name": "all_gather"}):
        yield route
        yield {**route, "host_size": per_host}


def messages(problem: Problem, rows: RowBytes) -> Iterator[Sent]:
    """Everything that all ranks send in a pass."""
    reads = Reads(problem)
    forwarding = Forwarding(reads, problem.kept)
    for rank in range(problem.schedule.num_ranks):
        program = lower(problem, rank)
        stays, walks = reads.stay_layout[rank], reads.walk_layout[rank]
        held = reads.stay_rows(rank)
        parts = [(program.walk.send, walks, "walk", rows.walk.gathered)]
        for at, step in enumerate(program.steps):
            here = forwarding.held(at, rank)
            parts += [
                (step.hop_out, here, "walk", rows.walk.row),
                (step.owner_out, walks, "walk", rows.walk.row),
            ]
            last = *step.partial_out, *step.home_out
            parts.append((last, here, "walk found", rows.walk.partial))
            for one in step.rounds:
                parts.append((one.fetch.send, stays, "stay", rows.stay.gathered))
                parts.append((one.home.send, held, "stay found", rows.stay.partial))
        for parcels, local, what, each in parts:
            for parcel in parcels:
                yield rank, parcel.peer, what, each, globalize(parcel.rows, local)


def crossings(problem: Problem, rows: RowBytes, per_host: int) -> str:
    """Bytes that cross over the least that can; "-" where none do."""
    crossed, seen = 0, Counter[tuple[str, int, int]]()
    for source, target, what, each, found in messages(problem, rows):
        hosts = source // per_host, target // per_host
        if hosts[0] == hosts[1]:
            continue
        crossed += size(found) * each
        host = hosts["found" not in what]
        seen |= Counter(
            {(what, host, row): each for start, stop in found for row in range(start, stop)}
        )
    return f"{crossed / seen.total():.2f}" if seen.total() else "-"


def kinds(placed: Placed) -> tuple[PassKind, PassKind]:
    """Forward and backward, keys staying on an all-gather."""
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
        placed, cells = read_placed(route, n), list[str]()
        for mask, name in columns.values():
            layout = make_layout(name, n, n * ROWS, mask.cu_seqlens or (0, n * ROWS), mask.slices)
            told = place(placed, n), layout, layout, mask
            both = (
                crossings(
                    Problem(*told, kind.queries_walk, host_size=placed.host_size),
                    kind.row_bytes(SHAPE),
                    args.ranks,
                )
                for kind in kinds(placed)
            )
            cells.append(" / ".join(both))
        print(f"| {placed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
