"""How much of our own code one attention call goes through: files, functions, calls.

One process plays one rank of 8, in teams of 2 (see host_time.py). A call counts whenever Python
enters a function of `wf_backends`, and whenever a generator of ours goes on. Code of torch counts
nowhere. The counts are the same in every run.

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
from host_time import one_of
from measure import cpu_name

import wf_backends
from wf_backends import SequenceParallel, SequenceParallelConfig

RANK, SIZE, SHARD, HEADS, HEAD_DIM = 3, 8, 16, 4, 16
ROUTE = {"name": "concentric", "team_size": 2}
OURS = str(Path(wf_backends.__file__).parent)


@dataclass(frozen=True)
class CallPath:
    """The functions of ours that a piece of work went through, and how often each was entered."""

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
        return f"{self.files} | {self.functions} | {self.calls}"


def followed(work: Callable[[], Any]) -> tuple[Any, CallPath]:
    """What the work gives, and its path."""
    entered = Counter[CodeType]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            entered[frame.f_code] += 1

    sys.setprofile(note)
    try:
        found = work()
    finally:
        sys.setprofile(None)
    return found, CallPath(entered)


def paths(causal: bool) -> dict[str, CallPath]:
    """Those of a first forward, and of a later forward and its backward."""
    words = {"sequence_parallel_size": SIZE, "route": ROUTE}
    with one_of(SIZE, RANK) as alone:
        sp = SequenceParallel(SequenceParallelConfig.from_dict(words), alone)
        x = torch.zeros(1, SHARD, HEADS, HEAD_DIM, requires_grad=True)
        out, first = followed(lambda: sp.attention(x, x, x, causal=causal))
        out.backward(torch.zeros_like(out))
        out, warm = followed(lambda: sp.attention(x, x, x, causal=causal))
        _, backward = followed(lambda: out.backward(torch.zeros_like(out)))
    return {"first forward": first, "warm forward": warm, "backward": backward}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="name each, with its calls")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cpu_name()}")
    print(f"Rank {RANK} of {SIZE}, concentric in teams of 2, shards of {SHARD} rows, zigzag.\n")
    print("| mask | what | files | functions | calls |\n|---|---|---|---|---|")
    for causal in (False, True):
        for name, path in paths(causal).items():
            print(f"| {'causal' if causal else 'full'} | {name} | {path} |")
            for code, count in Counter(path.entered).most_common() if args.functions else ():
                print(f"    {count} {Path(code.co_filename).relative_to(OURS)} {code.co_qualname}")


if __name__ == "__main__":
    main()
