"""The memory budget of `wallfacer plan` and real steps on one GPU: its memory, and the host's.

    python benchmarks/memory_budget.py --device cuda

One rank, one process. Bytes of the device are those that operators requested from torch's
allocator, without what earlier cases left. (Its "active_bytes" never fall in torch 2.11, and are no
measure.) Bytes of the host are the blocks of torch's pinned memory, which it rounds up to powers of
two and keeps. The first table has activations: bytes per token from two lengths, and all bytes at
both. The second table has whole steps of DeepSpeed's engine with AdamW, part by part.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from measure import attempt, become_only_rank, print_head, print_row
from memory_budget import CHECKPOINTS, Case
from memory_rank import warmed_up_step

from wf_backends.budget import Activations, Buckets, MemoryOptions, States

SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32768}
SHAPE |= {"num_attention_heads": 16, "num_key_value_heads": 8}
LAYERS = 8
SEQLENS = (8192, 16384)
TILED_SEQLENS = (32768, 65536)  # of shorter sequences one tile of logits is most of the memory
TILE_ROWS = 1024
BUCKETS = {"reduce_bucket_size": 50_000_000}
GIB = 1 << 30
REQUESTED, IN_BLOCKS = "requested_bytes.all", "allocated_bytes.all"  # of torch.cuda.memory_stats()


@dataclass(frozen=True)
class PredictedBytes:
    """At the peak of a step, on the device and on the host."""

    device: float
    host: float


@dataclass(frozen=True)
class MeasuredBytes:
    """At the peak of a step; before the step; and at the peak of each of its parts."""

    device: int
    blocks: int  # of torch's allocator, for the bytes of `device`
    host: int
    before: int  # weights, gradients and optimizer states
    parts: dict[str, int]  # "forward", "backward", "step"


def measured(case: Case) -> MeasuredBytes:
    """Run the case's step twice."""
    _free_cached_memory()
    earlier = torch.cuda.memory_stats()  # what earlier cases left
    step = warmed_up_step(case.arguments | {"device": "cuda", "buckets": BUCKETS})
    _free_cached_memory()

    def beyond_earlier(statistic: str, moment: str) -> int:
        now = torch.cuda.memory_stats()[f"{statistic}.{moment}"]
        return now - earlier[f"{statistic}.current"]

    before = beyond_earlier(REQUESTED, "current")
    parts: dict[str, int] = {}
    blocks = 0

    def after(part: str) -> None:
        nonlocal blocks
        torch.cuda.synchronize()
        parts[part] = max(parts.get(part, 0), beyond_earlier(REQUESTED, "peak"))
        blocks = max(blocks, beyond_earlier(IN_BLOCKS, "peak"))
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_host_memory_stats()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step(case.seqlen, after)
    host = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    return MeasuredBytes(max(parts.values()), blocks, host, before, parts)


def _free_cached_memory() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()


def predicted(case: Case) -> PredictedBytes:
    """Of activations alone; under DeepSpeed of the whole step."""
    states, activations = predicted_parts(case)
    device = activations.peak if states is None else states.peak(activations.peak)
    return PredictedBytes(device, activations.host)


def predicted_parts(case: Case) -> tuple[States | None, Activations]:
    """What a prediction is made of; the states are None without DeepSpeed."""
    training = replace(case.training(case.llama), buckets=Buckets(**BUCKETS))
    activations = training.activations(case.seqlen, MemoryOptions(case.checkpoints, case.tile))
    return None if case.stage is None else training.states(case.stage), activations


def activation_cases() -> Iterator[Case]:
    base = Case("bfloat16", shape=tuple(SHAPE.items()), layers=LAYERS)
    for checkpoints in CHECKPOINTS:
        for tile in (0, TILE_ROWS):
            yield replace(base, checkpoints=checkpoints, tile=tile)


def step_cases() -> Iterator[Case]:
    base = Case("bfloat16", shape=tuple(SHAPE.items()), layers=LAYERS, seqlen=SEQLENS[0])
    for stage in range(4):
        yield replace(base, checkpoints="device", stage=stage)
    yield replace(base, stage=0)


def activation_row(case: Case) -> None:
    """Print activations in bytes per token, on the device and on the host, and in GiB."""
    lengths = TILED_SEQLENS if case.tile else SEQLENS
    num_tokens = lengths[1] - lengths[0]
    short, long = (replace(case, seqlen=length) for length in lengths)
    measured_short, measured_long = measured(short), measured(long)
    predicted_short, predicted_long = predicted(short), predicted(long)
    expected = (predicted_long.device - predicted_short.device) / num_tokens
    requested = (measured_long.device - measured_short.device) / num_tokens
    in_blocks = (measured_long.blocks - measured_short.blocks) / num_tokens
    expected_host = (predicted_long.host - predicted_short.host) / num_tokens
    pinned = (measured_long.host - measured_short.host) / num_tokens
    cells = [case.checkpoints, f"tiles of {case.tile}" if case.tile else "whole"]
    cells += [f"{expected:,.0f}", f"{requested:,.0f}", f"{expected / requested:.2f}"]
    cells += [f"{in_blocks:,.0f}", f"{expected_host:,.0f}", f"{pinned:,.0f}", f"{lengths[1]:,}"]
    cells += [in_gib(predicted_short, measured_short), in_gib(predicted_long, measured_long)]
    print_row(*cells)


def in_gib(expected: PredictedBytes, result: MeasuredBytes) -> str:
    """A cell: predicted and measured GiB of activations on the device."""
    return f"{expected.device / GIB:.2f} {(result.device - result.before) / GIB:.2f}"


def step_row(case: Case) -> None:
    """Print the peak of a step of DeepSpeed's engine, the bytes before it, and its parts' peaks."""
    expected, result = predicted(case).device, measured(case)
    gigabytes = [expected, result.device, result.blocks, result.before, *result.parts.values()]
    predicted_gib, device, blocks, before, *parts = (f"{x / GIB:.2f}" for x in gigabytes)
    ratio = f"{expected / result.device:.2f}"
    print_row(case.stage, case.checkpoints, predicted_gib, device, ratio, blocks, before, *parts)


def print_prediction(case: Case) -> None:
    """Print what the prediction of a whole step is made of, in GiB."""
    states, activations = predicted_parts(case)
    assert states is not None
    parts = asdict(states) | asdict(activations)
    text = ", ".join(f"{name} {nbytes / GIB:.3f}" for name, nbytes in parts.items())
    print(f"<!-- {text} -->", flush=True)


def main() -> None:
    become_only_rank()
    parameters = next(activation_cases()).llama.parameters
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}; a Llama of ", end="")
    print(f"{parameters / 1e6:.0f} M parameters in bfloat16\n")
    head = ("checkpoints", "MLP, loss", "predicted bytes a token", "measured", "ratio")
    head += ("in blocks", "host predicted", "pinned", "long")
    print_head(*head, "predicted, measured GiB, short", "long")
    for case in activation_cases():
        attempt(partial(activation_row, case))
    print()
    head = (f"ZeRO stage, {SEQLENS[0]:,} tokens", "checkpoints", "predicted GiB", "measured")
    print_head(*head, "ratio", "in blocks", "before", "forward", "backward", "step")
    for case in step_cases():
        attempt(partial(step_row, case))
        print_prediction(case)
    os._exit(0)  # without the messages that DeepSpeed prints when a process ends
