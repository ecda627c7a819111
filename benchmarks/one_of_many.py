"""Time and memory of one rank of a large job before it computes: plan, program, consistency check.

One process acts as one rank of many: torch's "fake" process group delivers nothing, and the peers
send the same headers as this rank. No attention is computed, so the figures depend on the number of
ranks only.

    python benchmarks/one_of_many.py --ranks 8,64,512,4096
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from host_time import fake_job
from measure import cores_and_load, cpu_name, print_head, print_row
from planning import packed_documents

from wf_backends import SequenceParallelConfig
from wf_backends.cluster.discover import JobTopology
from wf_backends.cluster.presets import PRESETS
from wf_backends.parallel.attention import DistributedAttention
from wf_backends.parallel.softmax import plain_softmax
from wf_backends.schedule.mask import CAUSAL, Band, Mask

SHARD_ROWS, HEADS, KV_HEADS, HEAD_DIM = 2048, 32, 8, 128
WINDOW, MEAN_DOCUMENT = 4096, 8192  # tokens
CONFIGS: dict[str, dict[str, Any]] = {
    "auto": {},
    "ring, ulysses_degree 8": {"ulysses_degree": 8, "route": "ring"},
}
CALLS = 20


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="8,64,512,4096", help="separated by commas")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {cpu_name()}, {cores_and_load()}, one core")
    print(
        f"{SHARD_ROWS} tokens a rank, {HEADS} heads on {KV_HEADS} key heads, h100-8x400g, zigzag."
    )
    print(f"Window: {WINDOW} tokens; documents: of {MEAN_DOCUMENT} tokens on average.\n")
    times = ("before the first call", "before each later one")
    print_head("ranks", "config", "mask", *times, "memory")
    for size in map(int, args.ranks.split(",")):
        for config in CONFIGS:
            for mask in ("causal", "window", "documents"):
                first, later, peak = in_fresh_process(size, config, mask)
                cells = [f"{1e3 * first:,.0f} ms", f"{1e6 * later:,.0f} us"]
                print_row(size, config, mask, *cells, f"{peak / 2**20:,.0f} MiB")


def in_fresh_process(size: int, config: str, mask: str) -> tuple[float, float, int]:
    """Run `plan_one` in a new process, where nothing is cached."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(plan_one, size, config, mask).result()


def plan_one(size: int, config: str, mask_name: str) -> tuple[float, float, int]:
    """(seconds of the first plan, of a later one, bytes of memory) of a rank in the middle."""
    torch.set_num_threads(1)
    sp_config = SequenceParallelConfig(sequence_parallel_size=size, **CONFIGS[config])
    topology = PRESETS["h100-8x400g"].with_ranks(size)
    q = torch.zeros(1, SHARD_ROWS, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    kv = torch.zeros(1, SHARD_ROWS, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    mask = masks(size)[mask_name]
    with fake_job(size, size // 2) as comm:
        attention = DistributedAttention(sp_config, comm, JobTopology(comm, None, topology, Path()))
        run = partial(attention.call, q, kv, kv, mask, plain_softmax(HEAD_DIM), size * SHARD_ROWS)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        first, later = seconds(run), [seconds(run) for _ in range(CALLS)]
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return first, statistics.median(later), grown * 1024


def masks(size: int) -> dict[str, Mask]:
    """The masks of the table for `size` ranks."""
    documents = Mask(CAUSAL, packed_documents(MEAN_DOCUMENT, size * SHARD_ROWS))
    return {"causal": Mask(CAUSAL), "window": Mask(Band(WINDOW, 0)), "documents": documents}


def seconds(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
