"""The memory budget of `wallfacer plan` beside real steps on one GPU: its memory, and the host's.

    python benchmarks/memory_budget.py --device cuda

One rank, one process. The device's bytes are those that torch's allocator was asked for, beyond
what other cases left; the host's are the blocks of torch's pinned memory, which it rounds up to
powers of two and keeps. (Its "active_bytes" never fall in torch 2.11, and are no measure.)
Activations are counted for each token, from two lengths, and as a whole at the longer one; all
beside them by whole steps of DeepSpeed's engine with AdamW, part by part of a step.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch
from measure import attempt
from memory_budget import Point
from memory_rank import warmed_step

from wf_backends.budget import Buckets, Options

SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32768}
SHAPE |= {"num_attention_heads": 16, "num_key_value_heads": 8}
LAYERS = 8
SEQLENS = 8192, 16384
TILED_SEQLENS = 32768, 65536  # below, the fixed size of a tile of logits is what tells
TILE = 1024
BUCKETS = {"reduce_bucket_size": 50_000_000}
GIB = 1 << 30
ASKED, GIVEN = "requested_bytes.all", "allocated_bytes.all"


@dataclass(frozen=True)
class Bytes:
    """At the peak of a step."""

    device: float
    blocks: float
    host: float


@dataclass(frozen=True)
class Seen(Bytes):
    """`before` the step: weights, gradients, optimizer states. `parts`: the most of each part."""

    before: int
    parts: dict[str, int]


def measured(point: Point) -> Seen:
    """Of a real step, which runs twice."""
    _settle()
    left = torch.cuda.memory_stats()
    step = warmed_step(point.case | {"device": "cuda", "buckets": BUCKETS})
    _settle()
    before = torch.cuda.memory_stats()[f"{ASKED}.current"] - left[f"{ASKED}.current"]
    torch.cuda.reset_peak_host_memory_stats()
    parts, blocks = dict[str, int](), 0

    def after(part: str) -> None:
        nonlocal blocks
        torch.cuda.synchronize()
        now = torch.cuda.memory_stats()
        parts[part] = max(parts.get(part, 0), now[f"{ASKED}.peak"] - left[f"{ASKED}.current"])
        blocks = max(blocks, now[f"{GIVEN}.peak"] - left[f"{GIVEN}.current"])
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step(point.seqlen, after)
    host = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    return Seen(max(parts.values()), blocks, host, before, parts)


def _settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()


def predicted(point: Point) -> Bytes:
    """Of a step: without DeepSpeed activations alone, with it all."""
    options = Options(point.checkpoints, point.tile)
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
    """A row: bytes of activations for each token, on the device and on the host, and all of them
    at the longer length."""
    lengths = TILED_SEQLENS if one.tile else SEQLENS
    short, long = (replace(one, seqlen=length) for length in lengths)
    few, many = measured(short), measured(long)
    least, most = predicted(short), predicted(long)
    count = lengths[1] - lengths[0]
    told = (most.device - least.device) / count
    asked, given = (many.device - few.device) / count, (many.blocks - few.blocks) / count
    host, seen = (most.host - least.host) / count, (many.host - few.host) / count
    how = f"{one.checkpoints} | {f'tiles of {one.tile}' if one.tile else 'whole'}"
    device = f"{told:,.0f} | {asked:,.0f} | {told / asked:.2f} | {given:,.0f}"
    whole = [
        f"{f.device / GIB:.2f} {(x.device - x.before) / GIB:.2f}"
        for f, x in ((least, few), (most, many))
    ]
    at = " | ".join(whole)
    return f"| {how} | {device} | {host:,.0f} | {seen:,.0f} | {lengths[1]:,} | {at} |"


def whole_step(one: Point) -> str:
    """A row: all that a step of DeepSpeed's engine holds, and the most of each part of it."""
    told, seen = predicted(one), measured(one)
    ratio = f"{told.device / seen.device:.2f} | {seen.blocks / GIB:.2f}"
    parts = " | ".join(f"{count / GIB:.2f}" for count in (seen.before, *seen.parts.values()))
    cells = f"{told.device / GIB:.2f} | {seen.device / GIB:.2f} | {ratio} | {parts}"
    return f"| {one.stage} | {one.checkpoints} | {cells} |"


def terms(one: Point) -> str:
    """What the prediction of a whole step is made of, in GiB."""
    training = replace(one.training, buckets=Buckets(**BUCKETS))
    found = training.activations(one.seqlen, Options(one.checkpoints, one.tile))
    held = asdict(training.states(one.stage or 0)) | asdict(found)
    return ", ".join(f"{key} {value / GIB:.3f}" for key, value in held.items())


def main() -> None:
    one = next(points())
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"})
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}; a Llama of ", end="")
    print(f"{one.training.model.parameters / 1e6:.0f} M parameters in bfloat16\n")
    print("| checkpoints | MLP, loss | predicted bytes a token | measured | ratio ", end="")
    print("| in blocks | host predicted | pinned | long | predicted, measured GiB, short | long |")
    print(f"{'|---' * 11}|", flush=True)
    for point in points():
        attempt(lambda point=point: print(by_token(point), flush=True))
    print(
        f"\n| ZeRO stage, {SEQLENS[0]:,} tokens | checkpoints | predicted GiB | measured ", end=""
    )
    print("| ratio | in blocks | before | forward | backward | step |")
    print(f"{'|---' * 10}|", flush=True)
    for checkpoints, stage in (
        ("device", 0),
        ("device", 1),
        ("device", 2),
        ("device", 3),
        ("none", 0),
    ):
        point = replace(one, checkpoints=checkpoints, stage=stage, seqlen=SEQLENS[0])
        attempt(lambda point=point: print(whole_step(point), flush=True))
        print(f"<!-- {terms(point)} -->", flush=True)
    os._exit(0)  # what DeepSpeed would say on its way out is no figure
