"""Plans for packed documents: told of one document, told of their kind, told of the documents.

    python benchmarks/kinds.py

Predicted seconds on the real documents, over those of the best plan for them: what it costs that
the planner is told less, so that batches which are alike share a plan. 8 ranks, 32 heads of 128,
causal, layout document_zigzag, log-normal lengths (sigma = 1) of the given median; geometric means
over drawn batches and, in brackets, the worst of them.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from statistics import geometric_mean

from wf_backends.cost import Workload
from wf_backends.mask import CAUSAL, Mask
from wf_backends.planner import best_plan, price_plan
from wf_backends.plans import Plan, Request
from wf_backends.presets import PRESETS
from wf_backends.traffic import Shape
from wf_backends.typical import typical_documents

RANKS, TOKENS = 8, 65536
MEDIANS = (512, 1024, 2048, 4096)
CLUSTERS = ("h100-8x400g", "a100-4x-100gbe")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=6)
    args = parser.parse_args()
    print("| cluster | key heads | median | told of one document | told of their kind | kinds |")
    print("|---|---|---|---|---|---|")
    for name in CLUSTERS:
        for kv_heads in (8, 32):
            request = Request(
                PRESETS[name].with_ranks(RANKS),
                Workload(Shape(1, 32, kv_heads, 128, 2), TOKENS, Mask(CAUSAL)),
            )
            one = best_plan(request)
            for median in MEDIANS:
                cells = row(request, one, median, args.batches)
                print(f"| {name} | {kv_heads} | {median} | {' | '.join(cells)} |", flush=True)


def row(request: Request, one: Plan, median: int, batches: int) -> Iterator[str]:
    """Told of one document, told of their kind, and how many kinds there were."""
    untold: list[float] = []
    told: list[float] = []
    plans: dict[tuple[int, ...] | None, Plan] = {None: one}
    for seed in range(100, 100 + batches):
        borders = drawn(median, seed)
        real = packed(request, borders)
        best = best_plan(real).cost.seconds
        kind = typical_documents(borders, TOKENS, RANKS)
        if kind not in plans:
            plans[kind] = best_plan(packed(request, kind))
        untold.append(seconds(real, one) / best)
        told.append(seconds(real, plans[kind]) / best)
    for found in (untold, told):
        yield f"{geometric_mean(found):.2f} ({max(found):.2f})"
    yield str(len(plans) - 1)


def drawn(median: int, seed: int) -> tuple[int, ...]:
    """Borders of a batch's documents."""
    draw = random.Random(seed)
    ends = accumulate(1 + int(median * draw.lognormvariate(0, 1)) for _ in range(TOKENS))
    return (0, *(end for end in ends if end < TOKENS), TOKENS)


def packed(request: Request, borders: tuple[int, ...] | None) -> Request:
    mask = replace(request.workload.mask, cu_seqlens=borders)
    workload = replace(request.workload, mask=mask, layout="document_zigzag")
    return replace(request, workload=workload)


def seconds(request: Request, plan: Plan) -> float:
    """What a plan that was made for something else takes."""
    both = plan.forward.placed, plan.backward.placed
    return price_plan(request, plan.degree, *both, plan.moves).cost.seconds


if __name__ == "__main__":
    main()
