"""What heads in chunks (`"ulysses_chunks"`) gain: the best plan with them beside the best without.

python benchmarks/chunks.py > benchmarks/results/chunks.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from statistics import median

from wf_backends.cluster import load
from wf_backends.lowering import Shape
from wf_backends.planner import Request, Workload, best_plan
from wf_backends.schedule import make_mask

PRESETS = ("h100-8x400g", "a100-4x-100gbe")
MODELS = (  # heads, key heads, causal
    (32, 8, True),
    (64, 8, True),
    (32, 32, True),
    (28, 4, True),
    (24, 24, False),
)
LENGTHS = (1 << 16, 1 << 18, 1 << 20)
HEADING = """The planner's best plan beside its best with all heads at once; both are predicted.

    python benchmarks/chunks.py > benchmarks/results/chunks.md

Presets at their nominal rates, bfloat16, head_dim 128, zigzag; causal models of 32, 64 and 28 heads
with 8, 8 and 4 key heads, and of 32 with as many; a full one of 24 with as many; 64k, 256k and 1M
tokens. Gain: seconds of forward and backward without chunks / with them - 1. Times within 2 % count
as equal; then the plan that sends less is taken, so that a gain may be below 0.

| preset | ranks | cases | with chunks | gain over 5 % | median of those | largest |
|---|---|---|---|---|---|---|"""


def gains(preset: str, size: int) -> Iterator[float]:
    """The gain in every case where the best plan has several chunks."""
    for (heads, kv_heads, causal), seqlen in product(MODELS, LENGTHS):
        shape = Shape(1, heads, kv_heads, 128, itemsize=2)
        workload = Workload(shape, seqlen, make_mask(causal=causal))
        request = Request(load(preset, size), workload)
        plan, at_once = best_plan(request), best_plan(replace(request, chunks=(1,)))
        if plan.choice.chunks > 1:
            yield at_once.cost.seconds / plan.cost.seconds - 1


def main() -> None:
    print(HEADING)
    for preset, size in product(PRESETS, (8, 16, 32, 64, 128, 256)):
        in_chunks = list(gains(preset, size))
        large = [gain for gain in in_chunks if gain > 0.05]
        middle = f"{median(large):.0%}" if large else "-"
        cases, largest = len(MODELS) * len(LENGTHS), f"{max(in_chunks, default=0.0):.0%}"
        row = preset, size, cases, len(in_chunks), len(large), middle, largest
        print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
