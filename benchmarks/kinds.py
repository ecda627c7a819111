"""Plans for packed documents: planned as one document, by their kind, and by their exact borders.

    python benchmarks/kinds.py

Predicted milliseconds of three plans on the same documents: the plan of a call with one document,
the plan of a call with these documents (the planner sees their kind, not their borders), and the
best plan for exactly these documents (searched among all plans, for up to 8 ranks). 32 heads of
128, 8,192 tokens a rank, causal, layout document_zigzag, log-normal lengths (sigma = 1) of the
given median. Geometric means over random batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from statistics import geometric_mean

from bytes import random_documents
from measure import print_head, print_row

from wf_backends.cluster.presets import PRESETS
from wf_backends.config import SequenceParallelConfig
from wf_backends.cost.workload import Workload
from wf_backends.lowering.message_bytes import Shape
from wf_backends.parallel.choose import request_of
from wf_backends.planner.plan import EXACT_UP_TO, Plan, Request
from wf_backends.planner.search import best_plan, plan_for, price_plan
from wf_backends.schedule.mask import CAUSAL, Mask

SHARD_TOKENS = 8192
MEDIANS = (512, 1024, 2048, 4096)
CLUSTERS = ("h100-8x400g", "a100-4x-100gbe")
LAYOUT = "document_zigzag"
HEAD = "cluster", "ranks", "key heads", "median", "one document", "by kind", "best", "gain"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--ranks", default="8,16,32", help="separated by commas")
    args = parser.parse_args()
    print_head(*HEAD)
    for name in CLUSTERS:
        for ranks in map(int, args.ranks.split(",")):
            for kv_heads in (8, 32):
                shape = Shape(1, 32, kv_heads, 128, 2)
                workload = Workload(shape, SHARD_TOKENS * ranks, Mask(CAUSAL))
                request = Request(PRESETS[name].with_ranks(ranks), workload)
                for median in MEDIANS:
                    cells = times_and_gain(request, median, args.batches)
                    print_row(name, ranks, kv_heads, median, *cells)


def times_and_gain(request: Request, median: int, batches: int) -> Iterator[str]:
    """The cells: ms of the three plans ("-" if not searched), and the first / the second."""
    times: list[tuple[float, float, float]] = []
    for seed in range(100, 100 + batches):
        mask = Mask(CAUSAL, random_documents(request.workload.seqlen, median, seed))
        workload = replace(request.workload, mask=mask, layout=LAYOUT)
        exact = replace(request, workload=workload, exact_up_to=request.topology.size)
        one_document = price_plan(exact, plan_of_call(request, Mask(CAUSAL)).choice)
        by_kind = price_plan(exact, plan_of_call(request, mask).choice)
        best_s = 0.0  # not searched
        if request.topology.size <= EXACT_UP_TO:
            best_s = best_plan(exact).cost.seconds
        times.append((one_document.cost.seconds, by_kind.cost.seconds, best_s))
    one_document_s, by_kind_s, best_s = zip(*times, strict=True)
    means = geometric_mean(one_document_s), geometric_mean(by_kind_s)
    yield from (f"{1e3 * mean:.2f}" for mean in means)
    yield f"{1e3 * geometric_mean(best_s):.2f}" if all(best_s) else "-"
    yield f"{means[0] / means[1]:.2f}"


def plan_of_call(request: Request, mask: Mask) -> Plan:
    """The plan that an attention call with this mask gets."""
    config = SequenceParallelConfig(sequence_parallel_size=request.topology.size, layout=LAYOUT)
    return plan_for(
        request_of(config, request.workload.shape, request.workload.seqlen, mask, request.topology)
    )


if __name__ == "__main__":
    main()
