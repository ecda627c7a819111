"""Bytes that a rank sends for one attention layer, forward + backward, counted as they are sent.

    python benchmarks/bytes.py --ranks 8

In units of one rank's Q, the mean over the ranks; all ranks run as threads of this process, so that
no network is needed. "-": the heads cannot be divided like that.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator, run_threads

ROWS, HEADS, HEAD_DIM = 64, 8, 16


def named_points(size: int) -> dict[str, dict[str, Any]]:
    """The schemes with names that fit `size` ranks, as configurations."""
    points: dict[str, dict[str, Any]] = {
        "Ring Attention": {"route": "ring"},
        "all-gather (LSS)": {"route": "all_gather"},
        "Ulysses": {"route": "ring", "ulysses_degree": size},
        f"USP, 2 x ring({size // 2})": {"route": "ring", "ulysses_degree": 2},
    }
    for team in (2, 4):
        if size % team**2 == 0:
            route = {"name": "concentric", "team_size": team}
            points[f"WallFacer / StarTrail, C = {team}"] = {"route": route}
    for rows in (r for r in (2, 4, 8) if size % r == 0 and r < size):
        route = {"name": "mesh", "rows": rows, "cols": size // rows}
        points[f"mesh {rows} x {size // rows}"] = {"route": route}
    return points


def units_sent(size: int, words: dict[str, Any], kv_heads: int, causal: bool) -> float:
    """Units per rank, forward + backward, as the communicators counted them."""
    config = SequenceParallelConfig.from_dict({"sequence_parallel_size": size, **words})

    def one_rank(comm: Communicator) -> int:
        sp = SequenceParallel(config, comm)
        q, k, v = (torch.randn(1, ROWS, n, HEAD_DIM) for n in (HEADS, kv_heads, kv_heads))
        q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
        sp.attention(q, k, v, causal=causal).sum().backward()
        return sum(sp.report().values())

    unit = ROWS * HEADS * HEAD_DIM * 4
    return sum(run_threads(size, one_rank)) / size / unit


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    size = parser.parse_args().ranks
    cases = [(HEADS, False), (HEADS, True), (2, False), (2, True)]
    print(f"{size} ranks, {HEADS} heads of {HEAD_DIM}, float32, zigzag; torch {torch.__version__}")
    print("| scheme | full | causal | full, 2 key heads | causal, 2 key heads |")
    print("|---|---|---|---|---|")
    for name, words in named_points(size).items():
        cells = []
        for kv_heads, causal in cases:
            try:
                cells.append(f"{units_sent(size, words, kv_heads, causal):.1f}")
            except ValueError:
                cells.append("-")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
