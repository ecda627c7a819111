"""A rank's memory under every way to keep it low: as data, and as the rows of tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from wf_backends.budget.activations import CHECKPOINTS, Activations, Options
from wf_backends.budget.budget import Training
from wf_backends.budget.states import STAGES

GIB = 2**30
STATES = MappingProxyType(
    {
        "parameters": "parameters",
        "gradients": "gradients",
        "optimizer": "optimizer states",
        "buffers": "buckets, gathered parameters",
        "backward": "all beside activations",
        "at_step": "all at the optimizer's step",
    }
)
ACTIVATIONS = ("kept", "attention", "mlp", "loss", "peak", "host")

TILE = 1024  # tokens of a tile that stands beside whole MLPs and logits


class Rows(NamedTuple):
    """A table: cells by the names of their columns."""

    title: str
    rows: list[dict[str, str]]
    words: int
    """How many columns, the first ones, are words and not figures."""


def report(training: Training, seqlen: int, memory_bytes: float) -> dict[str, Any]:
    """States by ZeRO stage and activations by options, in bytes; sequences that fit, in tokens."""
    stages = [(stage, training.states(stage)) for stage in STAGES]
    model = training.model
    compared = product(CHECKPOINTS, (0, TILE))
    return {
        "model": asdict(model),
        "ranks": training.sequence_parallel_size * training.data_parallel_size,
        "tokens": training.tokens(seqlen),
        "memory_bytes": memory_bytes,
        "states": [
            {"stage": stage, **asdict(one), "backward": one.backward, "at_step": one.at_step}
            for stage, one in stages
        ],
        "choices": [
            _choice(training, seqlen, memory_bytes, Options(checkpoints, tile))
            for checkpoints, tile in compared
        ],
    }


def _choice(
    training: Training, seqlen: int, memory_bytes: float, options: Options
) -> dict[str, Any]:
    """One way to keep memory low: activations, and by stage bytes and the longest sequence."""
    found: Activations = training.activations(seqlen, options)
    longest = [training.longest(memory_bytes, stage, options) for stage in STAGES]
    return {
        **asdict(options),
        "activations": asdict(found) | {"peak": found.peak},
        "device_bytes": [training.device_bytes(seqlen, stage, options) for stage in STAGES],
        "longest": longest,
        "longest_host_bytes": training.activations(max(longest), options).host,
    }


def tables(found: Mapping[str, Any]) -> list[Rows]:
    """States, activations and the longest sequences of a report, in words."""
    stages = [f"ZeRO {stage}" for stage in STAGES]
    states = [
        {"": words} | dict(zip(stages, (gib(one[key]) for one in found["states"]), strict=True))
        for key, words in STATES.items()
    ]
    activations, longest = list[dict[str, str]](), list[dict[str, str]]()
    for one in found["choices"]:
        kept, tiles = one["checkpoints"], "tiles" if one["tile"] else "whole"
        named = {"checkpoints": kept if kept == "none" else f"on {kept}", "MLP, loss": tiles}
        held = {key.replace("mlp", "MLP"): gib(one["activations"][key]) for key in ACTIVATIONS}
        activations.append(named | held)
        fits = dict(zip(stages, map(_thousands, one["longest"]), strict=True))
        longest.append(named | fits | {"host GiB": gib(one["longest_host_bytes"])})
    tokens, limit = f"{found['tokens']:,} tokens", gib(found["memory_bytes"])
    return [
        Rows("Parameters, gradients, optimizer: GiB", states, 1),
        Rows(f"Activations of a rank's {tokens}: GiB", activations, 2),
        Rows(f"The longest sequence that fits {limit} GiB a rank: thousands of tokens", longest, 2),
    ]


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:,.{1 if tokens < 100_000 else 0}f}" if tokens else "-"


def gib(count: float) -> str:
    """Bytes in GiB, with two digits behind the point below 10, one below 100, else none."""
    value = count / GIB
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"
