"""How well the memory budget of `wallfacer plan` holds: predicted and measured, for small Llamas.

    python benchmarks/memory_budget.py
    python benchmarks/memory_budget.py --device cuda  # one rank, see memory_cuda.py
    python benchmarks/memory_families.py              # other models

Each figure comes from two runs in fresh processes that differ in the length or the number of
layers: the difference of their bytes / the difference of their tokens or parameters. So the memory
that any Python process takes drops out. Measured bytes are VmHWM of the largest rank (Linux). On a
CPU device and host are one memory, so with checkpoints on the host the sum of both is compared.
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
from measure import cores_and_load, cpu_name, last_lines, print_head, print_row

from wf_backends.budget import Buckets, Decoder, MemoryOptions, Training
from wf_backends.cluster import load
from wf_backends.lowering import Shape
from wf_backends.planner import Choice, Request, Workload, price_plan
from wf_backends.schedule import default_placement, make_mask

RANK = Path(__file__).with_name("memory_rank.py")
# The C library returns freed memory to the system at once, so that earlier peaks do not count.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
ENVIRONMENT |= {"DS_ACCELERATOR": "cpu"}
ITEMSIZES = {"float32": 4, "bfloat16": 2}
SMALL = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 256}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LARGE_VOCABULARY = SMALL | {"vocab_size": 16384}
WIDE = {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 512}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 4}
SEQLENS = (2048, 4096)  # of a rank
LAYERS = (4, 12)
CHECKPOINTS = ("none", "device", "host")  # where the inputs of recomputed layers are kept
BUCKETS = {"reduce_bucket_size": 500_000}


@dataclass(frozen=True, slots=True)
class Case:
    """A training job that is predicted and measured.

    family: of transformers' classes. checkpoints: one of CHECKPOINTS. shape: sizes of the model, as
    keyword arguments of its config. tile: rows of a tile of MLPs and loss; 0 = no tiles. stage: of
    DeepSpeed's ZeRO; None = a plain training loop without an optimizer. seqlen: of the whole
    sequence.
    """

    dtype: str
    checkpoints: str = "none"
    ranks: int = 1
    shape: tuple[tuple[str, int], ...] = tuple(SMALL.items())
    route: str = "ring"
    tile: int = 0
    stage: int | None = None
    seqlen: int = 64
    layers: int = 4
    family: str = "Llama"

    @property
    def arguments(self) -> dict[str, Any]:
        """The case as memory_rank.py takes it."""
        block = {"sequence_parallel_size": self.ranks, "route": {"name": self.route}}
        arguments = {"dtype": self.dtype, "shape": dict(self.shape), "wallfacer": block}
        arguments |= {"seqlen": self.seqlen, "layers": self.layers, "tile": self.tile}
        arguments["family"] = self.family
        if self.checkpoints != "none":
            arguments["activation_checkpointing"] = {"offload": self.checkpoints == "host"}
        if self.stage is not None:
            arguments |= {"stage": self.stage, "buckets": BUCKETS}
        return arguments

    @property
    def llama(self) -> Decoder:
        """A Llama of the case's sizes, without its layers counted."""
        sizes, itemsize = dict(self.shape), ITEMSIZES[self.dtype]
        heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        h, i, v = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
        d = h // heads
        layer_parameters = 2 * h * h + 2 * h * kv_heads * d + 3 * h * i + 2 * h
        parameters = self.layers * layer_parameters + 2 * h * v + h
        return Decoder(self.layers, h, i, v, heads, kv_heads, d, parameters, itemsize)

    def training(self, model: Decoder) -> Training:
        """The case as `wallfacer plan` sees it."""
        return Training(model, self.ranks, self._attention_bytes(model), buckets=Buckets(**BUCKETS))

    def _attention_bytes(self, model: Decoder) -> float:
        """Bytes of attention's buffers for each token of a rank, as the planner counts them."""
        seqlen, itemsize = 4096, model.itemsize
        shape = Shape(1, model.heads, model.kv_heads, model.head_dim, itemsize, max(4, itemsize))
        mask = make_mask(True, (-1, -1)).within(seqlen)
        workload = Workload(shape, seqlen, mask, "zigzag", "auto")
        topology = replace(load("one-host"), ranks_per_host=self.ranks)
        route = default_placement({"name": self.route}, self.ranks)
        plan = price_plan(Request(topology, workload), Choice(1, route, route))
        return plan.cost.memory_bytes / (seqlen / self.ranks)

    def predicted(self, model: Decoder | None = None) -> float:
        """Bytes of a rank, device and host; without `stage` activations alone.

        Args:
            model: None = the Llama, by formulas.
        """
        training = self.training(model or self.llama)
        activations = training.activations(self.seqlen, MemoryOptions(self.checkpoints, self.tile))
        if self.stage is None:
            return activations.peak + activations.host
        return training.states(self.stage).peak(activations.peak)

    def measured(self) -> int:
        """Bytes of the largest rank."""
        command = [sys.executable, str(RANK), json.dumps(self.arguments)]
        return max(map(int, last_lines(command, self.ranks, ENVIRONMENT)))


@dataclass(frozen=True, slots=True)
class Row:
    """Two cases, and the number of tokens or parameters by which they differ."""

    cells: tuple[str, ...]
    first: Case
    second: Case
    units: int

    def print(self) -> None:
        """Measure both cases and print the row."""
        predicted = (self.second.predicted() - self.first.predicted()) / self.units
        measured = (self.second.measured() - self.first.measured()) / self.units
        digits = 0 if predicted > 100 else 2
        figures = [f"{predicted:,.{digits}f}", f"{measured:,.{digits}f}"]
        print_row(*self.cells, *figures, f"{predicted / measured:.2f}")


def by_token() -> Iterator[Row]:
    """Activations: bytes for each token of a rank."""
    for case in token_cases():
        short, long = (replace(case, seqlen=case.ranks * seqlen) for seqlen in SEQLENS)
        vocabulary = dict(case.shape)["vocab_size"]
        model = f"{case.dtype}, {case.ranks} x {case.route}, vocabulary {vocabulary:,}"
        tiles = f"tiles of {case.tile}" if case.tile else "whole"
        yield Row((model, case.checkpoints, tiles), short, long, SEQLENS[1] - SEQLENS[0])


def token_cases() -> list[Case]:
    large_vocabulary = tuple(LARGE_VOCABULARY.items())
    cases = [Case(dtype, checkpoints) for dtype in ITEMSIZES for checkpoints in CHECKPOINTS]
    cases += [Case("bfloat16", where, shape=large_vocabulary) for where in ("none", "device")]
    cases += [Case("bfloat16", "device", 2, route=route) for route in ("ring", "all_gather")]
    cases.append(Case("bfloat16", "host", 2))
    tiled = replace(cases[0], shape=large_vocabulary, tile=256)
    for dtype in ITEMSIZES:
        cases += [replace(tiled, dtype=dtype, checkpoints=where) for where in CHECKPOINTS]
    return cases


def by_parameter() -> Iterator[Row]:
    """States: bytes for each parameter, of bfloat16 models on two ranks."""
    for stage in range(4):
        case = Case("bfloat16", ranks=2, shape=tuple(WIDE.items()), stage=stage)
        shallow, deep = (replace(case, layers=layers) for layers in LAYERS)
        difference = deep.llama.parameters - shallow.llama.parameters
        yield Row((f"{stage}",), shallow, deep, difference)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    if parser.parse_args().device == "cuda":
        import memory_cuda

        return memory_cuda.main()
    print(f"torch {torch.__version__}, {cpu_name()}, {cores_and_load()}\n")
    figures = ("predicted", "measured", "ratio")
    print_head("bytes a token of a rank", "checkpoints", "MLP, loss", *figures)
    for row in by_token():
        row.print()
    print()
    print_head("bytes for each parameter, ZeRO stage", *figures)
    for row in by_parameter():
        row.print()


if __name__ == "__main__":
    main()
