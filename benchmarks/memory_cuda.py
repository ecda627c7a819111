"""The memory budget of `wallfacer plan` beside real steps on one GPU: its memory, and the host's.

    python benchmarks/memory_budget.py --device cuda

One rank, one process. The device's bytes are those that torch's allocator was asked for, beyond
what other cases left; the host's are those of torch's pinned memory, which it rounds up to powers
of two. Activations are counted for each token, from two lengths; all beside them by whole steps of
DeepSpeed's engine with AdamW.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from memory_budget import Point
from memory_rank import warmed_step

from wf_backends.budget import Buckets, Options

SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32768}
SHAPE |= {"num_attention_heads": 16, "num_key_value_heads": 8}
LAYERS = 8
SEQLENS = 8192, 16384
TILE = 1024
BUCKETS = {"reduce_bucket_size": 50_000_000}
GIB = 1 << 30


@dataclass(frozen=True)
class Bytes:
    """At the peak of a step."""

    device: float
    blocks: float
    host: float


def measured(point: Point) -> Bytes:
    """Of a real step, which runs twice."""
    _settle()
    left = torch.cuda.memory_stats()
    step = warmed_step(point.case | {"device": "cuda", "buckets": BUCKETS})
    _settle()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_peak_host_memory_stats()
    for _ in range(2):
        step(point.seqlen)
    torch.cuda.synchronize()
    seen = torch.cuda.memory_stats()
    asked, given = (
        seen[f"{name}.all.peak"] - left[f"{name}.all.current"]
        for name in ("requested_bytes", "allocated_bytes")
    )
    return Bytes(asked, given, torch.cuda.host_memory_stats().get("active_bytes.peak", 0))


def _settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def predicted(point: Point) -> Bytes:
    """Of a step: without DeepSpeed activations alone, with it all."""
    options = Options(point.checkpoints, point.tile)  # type: ignore[arg-type]
    training = replace(point.training, buckets=Buckets(**BUCKETS))
    found = training.activations(point.seqlen, options)
    if point.stage is None:
        return Bytes(found.peak, found.peak, found.host)
    every = training.states(point.stage).peak(found.peak)
    return Bytes(every, every, found.host)


def points() -> Iterator[Point]:
    base = Point("bfloat16", shape=tuple(SHAPE.items()), layers=LAYERS)
    for checkpoints in ("none", "device", "host"):
        for tile in (0, TILE):
            yield replace(base, checkpoints=checkpoints, tile=tile)


def by_token(one: Point) -> str:
    """A row: bytes of activations for each token, on the device and on the host."""
    short, long = (replace(one, seqlen=length) for length in SEQLENS)
    few, many = measured(short), measured(long)
    least, most = predicted(short), predicted(long)
    count = SEQLENS[1] - SEQLENS[0]
    told = (most.device - least.device) / count
    asked, given = (many.device - few.device) / count, (many.blocks - few.blocks) / count
    host, seen = (most.host - least.host) / count, (many.host - few.host) / count
    how = f"{one.checkpoints} | {f'tiles of {one.tile}' if one.tile else 'whole'}"
    device = f"{told:,.0f} | {asked:,.0f} | {told / asked:.2f} | {given:,.0f}"
    return f"| {how} | {device} | {host:,.0f} | {seen:,.0f} | {many.device / GIB:.2f} |"


def whole_step(one: Point) -> str:
    """A row: all that a step of DeepSpeed's engine holds."""
    told, seen = predicted(one), measured(one)
    ratio = f"{told.device / seen.device:.2f} | {seen.blocks / GIB:.2f}"
    return f"| {one.stage} | {told.device / GIB:.2f} | {seen.device / GIB:.2f} | {ratio} |"


def main() -> None:
    one = next(points())
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"})
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}; a Llama of ", end="")
    print(f"{one.training.model.parameters / 1e6:.0f} M parameters in bfloat16\n")
    print("| checkpoints | MLP, loss | predicted bytes a token | measured | ratio ", end="")
    print(f"| in blocks | host predicted | pinned | GiB at {SEQLENS[1]:,} tokens |")
    print(f"{'|---' * 9}|", flush=True)
    for point in points():
        _guarded(lambda point=point: print(by_token(point), flush=True))
    print(f"\n| ZeRO stage, {SEQLENS[0]:,} tokens, checkpoints on device ", end="")
    print(f"| predicted GiB | measured | ratio | in blocks |\n{'|---' * 5}|", flush=True)
    for stage in range(4):
        point = replace(one, checkpoints="device", stage=stage, seqlen=SEQLENS[0])
        _guarded(lambda point=point: print(whole_step(point), flush=True))
    os._exit(0)  # what DeepSpeed would say on its way out is no figure


def _guarded(part: Callable[[], None]) -> None:
    """One row; if it fails, the others go on."""
    start = time.perf_counter()
    try:
        part()
    except Exception:
        traceback.print_exc()
    print(f"<!-- {time.perf_counter() - start:.1f} s -->", flush=True)
