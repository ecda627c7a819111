"""CPU milliseconds to lower a schedule, and to choose a plan, on a rank with empty caches.

python benchmarks/planning.py
"""

from __future__ import annotations

import platform
import random
import time
from itertools import accumulate, pairwise

from measure import print_head, print_row

from wf_backends.cluster.presets import PRESETS
from wf_backends.config import SequenceParallelConfig
from wf_backends.lowering.derivation import Problem, lower
from wf_backends.lowering.message_bytes import Shape
from wf_backends.parallel.choose import request_of
from wf_backends.planner.search import plan_for
from wf_backends.schedule.layout import zigzag
from wf_backends.schedule.mask import CAUSAL, Band, Mask, make_mask
from wf_backends.schedule.routes import concentric, mesh, ring
from wf_backends.schedule.schedule import Schedule

SEQLEN = 1 << 20


def packed_documents(length: int, seqlen: int = SEQLEN) -> tuple[int, ...]:
    """Borders (cu_seqlens) of documents of `length` tokens on average."""
    generator = random.Random(0)
    lengths: list[int] = []
    while sum(lengths) < seqlen:
        lengths.append(min(generator.randint(1, 2 * length), seqlen - sum(lengths)))
    return (0, *accumulate(lengths))


def video(frames: int, seqlen: int = SEQLEN) -> Mask:
    """Slices: every frame sees itself and the frames before it."""
    borders = range(0, seqlen + 1, seqlen // frames)
    return make_mask(
        seqlen=seqlen,
        q_ranges=list(pairwise(borders)),
        k_ranges=[(0, stop) for stop in borders[1:]],
        attn_mask_types=["full"] * frames,
    )


def time_lowering(schedule: Schedule, mask: Mask) -> float:
    """Milliseconds to lower a schedule for the middle rank, nothing cached."""
    layout = zigzag(schedule.num_ranks, SEQLEN)
    start = time.process_time()
    lower(Problem(schedule, layout, layout, mask), schedule.num_ranks // 2)
    return (time.process_time() - start) * 1e3


def time_planning(num_ranks: int, seqlen: int, mask: Mask) -> float:
    """Milliseconds of the planner's choice if the config has the number of ranks only."""
    config = SequenceParallelConfig(sequence_parallel_size=num_ranks)
    topology = PRESETS["h100-8x400g"].with_ranks(num_ranks)
    shape = Shape(batch=1, heads=32, kv_heads=8, head_dim=128, itemsize=2)
    start = time.process_time()
    plan_for(request_of(config, shape, seqlen, mask, topology))
    return (time.process_time() - start) * 1e3


def main() -> None:
    """Print the tables."""
    print(f"{SEQLEN} tokens, zigzag, causal; Python {platform.python_version()}, CPU ms")
    print_head("route", "ranks", "one document", "documents of 8,192 tokens")
    documents = packed_documents(8192)
    for num_ranks in (8, 64, 256):
        routes = {"ring": ring(num_ranks), "mesh 8": mesh(num_ranks, 8, num_ranks // 8)}
        if num_ranks % 16 == 0:
            routes["concentric 4"] = concentric(num_ranks, 4)
        for name, schedule in routes.items():
            masks = Mask(CAUSAL), Mask(CAUSAL, documents)
            times = [time_lowering(schedule, mask) for mask in masks]
            print_row(name, num_ranks, *(f"{ms:,.0f}" for ms in times))
    print("\nchoosing a plan, everything left open, 32 heads on 8 key heads, h100-8x400g, CPU ms")
    masks = {
        "window of 8,192": Mask(Band(8192, 0)),
        "window of 262,144": Mask(Band(1 << 18, 0)),
        "documents of 8,192 tokens": Mask(CAUSAL, documents),
        "slices, 16 frames": video(16),
    }
    print_head("ranks", "first length", "another length", *masks)
    for num_ranks in (2, 4, 8, 16, 32, 64, 256, 4096):
        times = [time_planning(num_ranks, seqlen, Mask(CAUSAL)) for seqlen in (SEQLEN, SEQLEN // 2)]
        times += [time_planning(num_ranks, SEQLEN, mask) for mask in masks.values()]
        print_row(num_ranks, *(f"{ms:,.0f}" for ms in times))


if __name__ == "__main__":
    main()
