"""How well the memory budget of `wallfacer plan` holds: predicted beside measured, on small Llamas.

    python benchmarks/memory_budget.py
    python benchmarks/memory_budget.py --device cuda  # one rank, see memory_cuda.py

Each figure is the difference of two runs in fresh processes, of two lengths or two numbers of
layers, divided by theirs: what a process takes for itself drops out. Measured is the largest rank's
VmHWM (Linux). Device and host are one memory here, so that with checkpoints on the host the sum of
both is compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measure import cores_and_load, cpu_name, last_lines

from wf_backends.budget import Buckets, Decoder, Options, Training
from wf_backends.cluster import load
from wf_backends.lowering import Shape
from wf_backends.planner import Choice, Request, Workload, price_plan
from wf_backends.schedule import in_rank_order, make_mask

RANK = Path(__file__).with_name("memory_rank.py")
# Freed memory goes back to the system at once, whatever was allocated before
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
ENVIRONMENT |= {"DS_ACCELERATOR": "cpu"}
ITEMSIZES = {"float32": 4, "bfloat16": 2}
SMALL = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 256}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
VOCABULARY = SMALL | {"vocab_size": 16384}
WIDE = {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 512}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 4}
SEQLENS = (2048, 4096)  # for each rank
LAYERS = 4, 12
BUCKETS = {"reduce_bucket_size": 500_000}


@dataclass(frozen=True, slots=True)
class Point:
    """One run: what is trained, and what of it varies."""

    dtype: str
    checkpoints: str = "none"
    ranks: int = 1
    shape: tuple[tuple[str, int], ...] = tuple(SMALL.items())
    route: str = "ring"
    tile: int = 0
    stage: int | None = None
    seqlen: int = 64
    layers: int = 4

    @property
    def case(self) -> dict[str, Any]:
        """What memory_rank.py takes."""
        words = {"sequence_parallel_size": self.ranks, "route": {"name": self.route}}
        case = {"dtype": self.dtype, "shape": dict(self.shape), "words": words}
        case |= {"seqlen": self.seqlen, "layers": self.layers, "tile": self.tile}
        if self.checkpoints != "none":
            case["activation_checkpointing"] = {"offload": self.checkpoints == "host"}
        return case if self.stage is None else case | {"stage": self.stage, "buckets": BUCKETS}

    @property
    def training(self) -> Training:
        sizes, itemsize = dict(self.shape), ITEMSIZES[self.dtype]
        heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        h, i, v = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
        d = h // heads
        each = 2 * h * h + 2 * h * kv_heads * d + 3 * h * i + 2 * h
        count = self.layers * each + 2 * h * v + h
        model = Decoder(self.layers, h, i, v, heads, kv_heads, d, count, itemsize)
        return Training(model, self.ranks, self._attention_bytes(model), buckets=Buckets(**BUCKETS))

    def _attention_bytes(self, model: Decoder) -> float:
        """For each token of a rank, as the planner counts them."""
        item = model.itemsize
        shape = Shape(1, model.heads, model.kv_heads, model.head_dim, item, max(4, item))
        work = Workload(shape, 4096, make_mask(True, (-1, -1)).within(4096), "zigzag", "auto")
        topology = replace(load("one-host"), ranks_per_host=self.ranks)
        route = in_rank_order({"name": self.route}, self.ranks)
        plan = price_plan(Request(topology, work), Choice(1, route, route))
        return plan.cost.memory_bytes / (4096 / self.ranks)

    def predicted(self) -> float:
        """Bytes of a rank, its device's and the host's."""
        options = Options(self.checkpoints, self.tile)
        found = self.training.activations(self.seqlen, options)
        if self.stage is None:  # gradients live between steps, and there is no optimizer
            return found.peak + found.host
        return self.training.states(self.stage).peak(found.peak)

    def measured(self) -> int:
        """Bytes of the largest rank."""
        command = [sys.executable, str(RANK), json.dumps(self.case)]
        return max(map(int, last_lines(command, self.ranks, ENVIRONMENT)))


@dataclass(frozen=True, slots=True)
class Row:
    """Two runs, and what their difference is divided by."""

    words: str
    first: Point
    second: Point
    units: float

    def line(self) -> str:
        """As a row of the table."""
        predicted = (self.second.predicted() - self.first.predicted()) / self.units
        measured = (self.second.measured() - self.first.measured()) / self.units
        digits = 0 if predicted > 100 else 2
        figures = f"{predicted:,.{digits}f} | {measured:,.{digits}f}"
        return f"| {self.words} | {figures} | {predicted / measured:.2f} |"


def by_token() -> Iterator[Row]:
    """Activations: bytes for each token of a rank."""
    points = [
        Point(dtype, checkpoints)
        for dtype in ITEMSIZES
        for checkpoints in ("none", "device", "host")
    ]
    points += [Point("bfloat16", c, shape=tuple(VOCABULARY.items())) for c in ("none", "device")]
    points += [Point("bfloat16", "device", 2, route=route) for route in ("ring", "all_gather")]
    points += [Point("bfloat16", "host", 2)]
    points += [
        Point(dtype, c, shape=tuple(VOCABULARY.items()), tile=256)
        for dtype in ITEMSIZES
        for c in ("none", "device", "host")
    ]
    for one in points:
        short, long = (replace(one, seqlen=one.ranks * s) for s in SEQLENS)
        vocabulary = dict(one.shape)["vocab_size"]
        words = f"{one.dtype}, {one.ranks} x {one.route}, vocabulary {vocabulary:,}"
        tiles = f"tiles of {one.tile}" if one.tile else "whole"
        yield Row(f"{words} | {one.checkpoints} | {tiles}", short, long, SEQLENS[1] - SEQLENS[0])


def by_parameter() -> Iterator[Row]:
    """States: bytes for each parameter, of bfloat16 models on two ranks."""
    for stage in range(4):
        one = Point("bfloat16", ranks=2, shape=tuple(WIDE.items()), stage=stage)
        few, many = (replace(one, layers=layers) for layers in LAYERS)
        units = many.training.model.parameters - few.training.model.parameters
        yield Row(f"{stage}", few, many, units)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    if parser.parse_args().device == "cuda":
        import memory_cuda

        return memory_cuda.main()
    print(f"torch {torch.__version__}, {cpu_name()}, {cores_and_load()}\n")
    print("| bytes a token of a rank | checkpoints | MLP, loss | predicted | measured | ratio |")
    print("|---|---|---|---|---|---|")
    for row in by_token():
        print(row.line(), flush=True)
    print("\n| bytes for each parameter, ZeRO stage | predicted | measured | ratio |")
    print("|---|---|---|---|")
    for row in by_parameter():
        print(row.line(), flush=True)


if __name__ == "__main__":
    main()
