"""Count the bytes that a rank sends for one attention layer, forward + backward.

    python benchmarks/bytes.py --ranks 8

Bytes are in units of one rank's Q, the mean of all ranks. The ranks are threads of this process,
without a network. "-": the ranks do not divide the heads. Documents have random lengths
(log-normal, median half a shard) and are packed without padding.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from measure import print_head, print_row

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator, run_threads

SHARD_ROWS, HEADS, HEAD_DIM = 64, 8, 16


@dataclass(frozen=True)
class Case:
    """A column of the table: arguments of the attention call, heads and layout."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    kv_heads: int = HEADS
    layout: str = "zigzag"


HEAD_CASES = (
    Case("full"),
    Case("causal", {"causal": True}),
    Case("full, 2 key heads", kv_heads=2),
    Case("causal, 2 key heads", {"causal": True}, kv_heads=2),
)


def sparse_cases(size: int) -> tuple[Case, ...]:
    """Cases whose masks hide most pairs of shards."""
    window = {"causal": True, "window_size": (SHARD_ROWS, 0)}
    borders = random_documents(size * SHARD_ROWS, SHARD_ROWS / 2)
    packed = {"causal": True, "cu_seqlens": borders}
    return (
        Case("window, contiguous", window, layout="contiguous"),
        Case("window, zigzag", window),
        Case("documents, contiguous", packed, layout="contiguous"),
        Case("documents, zigzag", packed),
        Case("documents, document_zigzag", packed, layout="document_zigzag"),
    )


def random_documents(tokens: int, median: float, seed: int = 0) -> tuple[int, ...]:
    """Borders (cu_seqlens) of packed documents of log-normal lengths (sigma = 1)."""
    generator = random.Random(seed)
    lengths = (1 + int(generator.lognormvariate(0, 1) * median) for _ in range(tokens))
    borders = (border for border in accumulate(lengths) if border < tokens)
    return (0, *borders, tokens)


def named_points(size: int) -> dict[str, dict[str, Any]]:
    """Configurations of the named schemes that fit `size` ranks."""
    schemes: dict[str, dict[str, Any]] = {
        "Ring Attention": {"route": "ring"},
        "all-gather (LSS)": {"route": "all_gather"},
        "Ulysses": {"route": "ring", "ulysses_degree": size},
        f"USP, 2 x ring({size // 2})": {"route": "ring", "ulysses_degree": 2},
    }
    for team in (2, 4):
        if size % team**2 == 0:
            route = {"name": "concentric", "team_size": team}
            schemes[f"WallFacer / StarTrail, C = {team}"] = {"route": route}
    for rows in (2, 4, 8):
        if size % rows == 0 and rows < size:
            route = {"name": "mesh", "rows": rows, "cols": size // rows}
            schemes[f"mesh {rows} x {size // rows}"] = {"route": route}
    return schemes


def units_sent(size: int, options: dict[str, Any], case: Case) -> float:
    """Units sent per rank, forward + backward, as the communicators count them."""
    options = {"sequence_parallel_size": size, "layout": case.layout, **options}
    config = SequenceParallelConfig.from_dict(options)

    def one_rank(comm: Communicator) -> int:
        sp = SequenceParallel(config, comm)
        head_counts = (HEADS, case.kv_heads, case.kv_heads)
        whole = (torch.randn(1, size * SHARD_ROWS, heads, HEAD_DIM) for heads in head_counts)
        borders = case.arguments.get("cu_seqlens")
        q, k, v = (sp.shard(x, dim=1, cu_seqlens=borders).requires_grad_() for x in whole)
        sp.attention(q, k, v, **case.arguments).sum().backward()
        return sum(sp.report().values())

    unit = SHARD_ROWS * HEADS * HEAD_DIM * 4  # bytes
    return sum(run_threads(size, one_rank)) / size / unit


def print_table(size: int, cases: tuple[Case, ...]) -> None:
    """Print a row for every scheme that fits."""
    print_head("scheme", *(case.name for case in cases))
    for name, options in named_points(size).items():
        cells: list[str] = []
        for case in cases:
            try:
                cells.append(f"{units_sent(size, options, case):.1f}")
            except ValueError:
                cells.append("-")
        print_row(name, *cells)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    size = parser.parse_args().ranks
    print(f"{size} ranks, {HEADS} heads of {HEAD_DIM}, float32, zigzag; torch {torch.__version__}")
    print_table(size, HEAD_CASES)
    print(f"\nA causal window of a shard ({SHARD_ROWS} tokens), and packed documents, causal")
    print_table(size, sparse_cases(size))


if __name__ == "__main__":
    main()
