"""A rank's memory under every ZeRO stage and every choice of options: as data, and as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from wf_backends.budget.activations import CHECKPOINTS, MemoryOptions
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

TILE = 1024  # tokens; every option is reported without tiles and with tiles of this size


class Table(NamedTuple):
    """The text of a table; each row maps the name of a column to its cell."""

    title: str
    rows: list[dict[str, str]]
    text_columns: int
    """The first columns, which hold text; the others hold figures."""


def report(training: Training, seqlen: int, memory_bytes: float) -> dict[str, Any]:
    """States by ZeRO stage and activations by options, in bytes; sequences that fit, in tokens."""
    by_stage = [(stage, training.states(stage)) for stage in STAGES]
    return {
        "model": asdict(training.model),
        "ranks": training.sequence_parallel_size * training.data_parallel_size,
        "tokens": training.tokens(seqlen),
        "memory_bytes": memory_bytes,
        "states": [
            {"stage": stage, **asdict(s), "backward": s.backward, "at_step": s.at_step}
            for stage, s in by_stage
        ],
        "choices": [
            _choice(training, seqlen, memory_bytes, MemoryOptions(checkpoints, tile))
            for checkpoints, tile in product(CHECKPOINTS, (0, TILE))
        ],
    }


def _choice(
    training: Training, seqlen: int, memory_bytes: float, options: MemoryOptions
) -> dict[str, Any]:
    """For one choice of options: activations, and for each stage bytes and the longest sequence."""
    activations = training.activations(seqlen, options)
    longest = [training.longest(memory_bytes, stage, options) for stage in STAGES]
    return {
        **asdict(options),
        "activations": asdict(activations) | {"peak": activations.peak},
        "device_bytes": [training.device_bytes(seqlen, stage, options) for stage in STAGES],
        "longest": longest,
        "longest_host_bytes": training.activations(max(longest), options).host,
    }


def tables(budget: Mapping[str, Any]) -> list[Table]:
    """The tables of a `report`: states, activations and the longest sequences."""
    stages = [f"ZeRO {stage}" for stage in STAGES]
    states = [
        {"": title} | dict(zip(stages, (gib(row[key]) for row in budget["states"]), strict=True))
        for key, title in STATES.items()
    ]
    activations, longest = list[dict[str, str]](), list[dict[str, str]]()
    for choice in budget["choices"]:
        checkpoints = choice["checkpoints"]
        options = {
            "checkpoints": checkpoints if checkpoints == "none" else f"on {checkpoints}",
            "MLP, loss": "tiles" if choice["tile"] else "whole",
        }
        sizes = {key.replace("mlp", "MLP"): gib(choice["activations"][key]) for key in ACTIVATIONS}
        activations.append(options | sizes)
        fits = dict(zip(stages, map(_thousands, choice["longest"]), strict=True))
        longest.append(options | fits | {"host GiB": gib(choice["longest_host_bytes"])})
    tokens, limit = f"{budget['tokens']:,} tokens", gib(budget["memory_bytes"])
    counted, why = "counted in the model's layers", budget["model"]["uncounted"]
    if not budget["model"]["kinds"]:
        counted = "by formulas for Llama's layers" + f" ({why})" * bool(why)
    return [
        Table("Parameters, gradients, optimizer: GiB", states, 1),
        Table(f"Activations of a rank's {tokens}, {counted}: GiB", activations, 2),
        Table(
            f"The longest sequence that fits {limit} GiB a rank: thousands of tokens", longest, 2
        ),
    ]


def _thousands(tokens: int) -> str:
    if not tokens:
        return "-"
    digits = 1 if tokens < 100_000 else 0
    return f"{tokens / 1000:,.{digits}f}"


def gib(count: float) -> str:
    """Bytes in GiB, with two digits behind the point below 10, one below 100, else none."""
    value = count / GIB
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"
