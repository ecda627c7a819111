"""Count the files, functions and calls of `wf_backends` in one attention call.

One process acts as one rank of 8, in teams of 2 (see host_time.py). A call is counted whenever
Python enters a function of `wf_backends` or resumes one of its generators; code of torch is not
counted. The counts are the same in every run.

    python benchmarks/call_path.py
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from host_time import fake_job
from measure import cpu_name, print_head, print_row

import wf_backends
from wf_backends import SequenceParallel, SequenceParallelConfig

RANK, SIZE, SHARD_ROWS, HEADS, HEAD_DIM = 3, 8, 16, 4, 16
ROUTE = {"name": "concentric", "team_size": 2}
PACKAGE = str(Path(wf_backends.__file__).parent)


@dataclass(frozen=True)
class CallPath:
    """How often each function of `wf_backends` was entered."""

    entered: Mapping[CodeType, int]

    @property
    def files(self) -> int:
        return len({code.co_filename for code in self.entered})

    @property
    def functions(self) -> int:
        return len(self.entered)

    @property
    def calls(self) -> int:
        return sum(self.entered.values())

    def __str__(self) -> str:
        return f"{self.files} files, {self.functions} functions, {self.calls} calls"


def traced(work: Callable[[], Any]) -> tuple[Any, CallPath]:
    """The result of `work`, and its call path."""
    entered = Counter[CodeType]()

    def count_call(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered[frame.f_code] += 1

    sys.setprofile(count_call)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    return result, CallPath(entered)


def paths(causal: bool) -> dict[str, CallPath]:
    """Call paths of a first forward, and of a later (warm) forward and its backward."""
    options = {"sequence_parallel_size": SIZE, "route": ROUTE}
    with fake_job(SIZE, RANK) as comm:
        sp = SequenceParallel(SequenceParallelConfig.from_dict(options), comm)
        x = torch.zeros(1, SHARD_ROWS, HEADS, HEAD_DIM, requires_grad=True)
        out, first = traced(lambda: sp.attention(x, x, x, causal=causal))
        out.backward(torch.zeros_like(out))
        out, warm = traced(lambda: sp.attention(x, x, x, causal=causal))
        _, backward = traced(lambda: out.backward(torch.zeros_like(out)))
    return {"first forward": first, "warm forward": warm, "backward": backward}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="name each, with its calls")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cpu_name()}")
    print(
        f"Rank {RANK} of {SIZE}, concentric in teams of 2, shards of {SHARD_ROWS} rows, zigzag.\n"
    )
    print_head("mask", "what", "files", "functions", "calls")
    for causal in (False, True):
        for name, path in paths(causal).items():
            mask = "causal" if causal else "full"
            print_row(mask, name, path.files, path.functions, path.calls)
            if args.functions:
                for code, count in Counter(path.entered).most_common():
                    file = Path(code.co_filename).relative_to(PACKAGE)
                    print(f"    {count} {file} {code.co_qualname}")


if __name__ == "__main__":
    main()
