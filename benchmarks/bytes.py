"""Bytes that a rank sends for one attention layer, forward + backward, counted as they are sent.

    python benchmarks/bytes.py --ranks 8

In units of one rank's Q, the mean over the ranks; all ranks run as threads of this process, so that
no network is needed. "-": the heads cannot be divided like that. Documents are of drawn lengths
(log-normal, half a shard in the middle), packed without padding.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator, run_threads

ROWS, HEADS, HEAD_DIM = 64, 8, 16


@dataclass(frozen=True)
class Case:
    """A column: what attention is asked for, beside the scheme."""

    name: str
    asked: Mapping[str, Any] = field(default_factory=dict)
    kv_heads: int = HEADS
    layout: str = "zigzag"


HEAD_CASES = (
    Case("full"),
    Case("causal", {"causal": True}),
    Case("full, 2 key heads", kv_heads=2),
    Case("causal, 2 key heads", {"causal": True}, kv_heads=2),
)


def near_cases(size: int) -> tuple[Case, ...]:
    """Masks under which most pairs of shards have nothing to do with each other."""
    window = {"causal": True, "window_size": (ROWS, 0)}
    packed = {"causal": True, "cu_seqlens": drawn_documents(size * ROWS, ROWS / 2)}
    return (
        Case("window, contiguous", window, layout="contiguous"),
        Case("window, zigzag", window),
        Case("documents, contiguous", packed, layout="contiguous"),
        Case("documents, zigzag", packed),
        Case("documents, document_zigzag", packed, layout="document_zigzag"),
    )


def drawn_documents(tokens: int, median: float, seed: int = 0) -> tuple[int, ...]:
    """Borders of packed documents of log-normal lengths (sigma = 1), the same in every run."""
    draw = random.Random(seed)
    lengths = (1 + int(draw.lognormvariate(0, 1) * median) for _ in range(tokens))
    borders = (border for border in accumulate(lengths) if border < tokens)
    return (0, *borders, tokens)


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


def units_sent(size: int, words: dict[str, Any], case: Case) -> float:
    """Units per rank, forward + backward, as the communicators counted them."""
    words = {"sequence_parallel_size": size, "layout": case.layout, **words}
    config = SequenceParallelConfig.from_dict(words)

    def one_rank(comm: Communicator) -> int:
        sp, kv_heads = SequenceParallel(config, comm), case.kv_heads
        whole = (torch.randn(1, size * ROWS, n, HEAD_DIM) for n in (HEADS, kv_heads, kv_heads))
        borders = case.asked.get("cu_seqlens")
        q, k, v = (sp.shard(x, dim=1, cu_seqlens=borders).requires_grad_() for x in whole)
        sp.attention(q, k, v, **case.asked).sum().backward()
        return sum(sp.report().values())

    unit = ROWS * HEADS * HEAD_DIM * 4
    return sum(run_threads(size, one_rank)) / size / unit


def print_table(size: int, cases: tuple[Case, ...]) -> None:
    """Every scheme that fits, one a row."""
    print(f"| scheme | {' | '.join(case.name for case in cases)} |")
    print("|---" * (1 + len(cases)) + "|")
    for name, words in named_points(size).items():
        cells = []
        for case in cases:
            try:
                cells.append(f"{units_sent(size, words, case):.1f}")
            except ValueError:
                cells.append("-")
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    size = parser.parse_args().ranks
    print(f"{size} ranks, {HEADS} heads of {HEAD_DIM}, float32, zigzag; torch {torch.__version__}")
    print_table(size, HEAD_CASES)
    print(f"\nA causal window of a shard ({ROWS} tokens), and packed documents, causal")
    print_table(size, near_cases(size))


if __name__ == "__main__":
    main()
