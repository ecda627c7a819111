"""The second part of `wallfacer plan --model FOLDER --memory-gib 80`: a rank's whole memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.markup import escape

from wf_backends.budget import STAGES, Decoder, Options, States, Training
from wf_backends.cli import options as o
from wf_backends.cli.readers import read_model
from wf_backends.planner import Plan, Request

GIB = 2**30
CHECKPOINTS = MappingProxyType({"none": "none", "device": "on device", "host": "on host"})
OPTION_NAMES = ("checkpoints", "MLP, loss")
STAGE_NAMES = tuple(f"ZeRO {stage}" for stage in STAGES)
STATE_NAMES = MappingProxyType(
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
LEFT: Mapping[str, Any] = MappingProxyType({"title_justify": "left"})


def budget_of(
    name: str, data_parallel_size: int, plans: Sequence[Plan], counted: Request, asked: Request
) -> dict[str, Any]:
    """The budget of a model under the first of the plans as data, in bytes and tokens.

    Args:
        name: of the model.
        counted: the request that the plans answer; its ranks may stand for more.

    Raises:
        ValueError, NotImplementedError: if the model's config does not tell its sizes, or is of a
            mixture of experts.
    """
    work, ranks, limit = asked.workload, asked.topology.size, asked.memory_limit
    sizes, shape = read_model(name, sizes=True), work.shape
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    model = Decoder(**(sizes | heads), itemsize=shape.itemsize)
    rows = counted.workload.seqlen / counted.topology.size * shape.batch
    each = plans[0].cost.memory_bytes / rows
    training = Training(model, ranks, each, shape.batch, data_parallel_size)
    tokens, routes = training.tokens(work.seqlen), dict[str, float]()
    for plan in plans:
        route, needs = plan.choice.forward.route["name"], plan.cost.memory_bytes / rows * tokens
        routes[route] = min(needs, routes.get(route, needs))
    compared = product(CHECKPOINTS, (0, model.hidden))  # tiles as long as the hidden size is wide
    return {
        "model": asdict(model),
        "ranks": ranks * data_parallel_size,
        "tokens": tokens,
        "memory_bytes": limit,
        "states": [{"stage": stage, **_states(training.states(stage))} for stage in STAGES],
        "attention_buffers": routes,
        "choices": [
            _choice(training, work.seqlen, limit, Options(checkpoints, tile))  # pyright: ignore[reportArgumentType]
            for checkpoints, tile in compared
        ],
    }


def _states(states: States) -> dict[str, float]:
    return asdict(states) | {"backward": states.backward, "at_step": states.at_step}


def _choice(training: Training, seqlen: int, limit: float, options: Options) -> dict[str, Any]:
    """One way to keep memory low: activations, and by stage bytes and the longest sequence."""
    found = training.activations(seqlen, options)
    longest = [training.longest(limit, stage, options) for stage in STAGES]
    return {
        **asdict(options),
        "activations": asdict(found) | {"peak": found.peak},
        "device_bytes": [training.device_bytes(seqlen, stage, options) for stage in STAGES],
        "longest": longest,
        "longest_host_bytes": training.activations(max(longest), options).host,
    }


def show_budget(name: str, budget: dict[str, Any], console: Console) -> None:
    """Print states, activations, the longest sequence that fits, and attention's buffers."""
    model, limit = budget["model"], budget["memory_bytes"]
    console.print(
        f"[bold]A rank's memory in training:[/bold] {escape(name)}, "
        f"{model['parameters'] / 1e9:,.3g} B parameters of {model['itemsize']} bytes, "
        f"Adam, {budget['ranks']} ranks"
    )
    states = o.new_table("Parameters, gradients, optimizer: GiB", [""], STAGE_NAMES, **LEFT)
    for key, words in STATE_NAMES.items():
        states.add_row(words, *(_gib(each[key]) for each in budget["states"]))
    title = f"Activations of a rank's {budget['tokens']:,} tokens: GiB"
    shown = [key.replace("mlp", "MLP") for key in ACTIVATIONS]
    activations = o.new_table(title, OPTION_NAMES, shown, **LEFT)
    title = f"The longest sequence that fits {_gib(limit)} GiB a rank: thousands of tokens"
    longest = o.new_table(title, OPTION_NAMES, [*STAGE_NAMES, "host GiB"], **LEFT)
    for one in budget["choices"]:
        words = CHECKPOINTS[one["checkpoints"]], "tiles" if one["tile"] else "whole"
        activations.add_row(*words, *(_gib(one["activations"][key]) for key in ACTIVATIONS))
        longest.add_row(*words, *map(_thousands, one["longest"]), _gib(one["longest_host_bytes"]))
    for table in (states, activations, longest):
        console.print(table)
    routes = sorted(budget["attention_buffers"].items(), key=lambda one: one[1])
    said = ", ".join(f"{route} {_gib(needs)}" for route, needs in routes)
    console.print(f"Attention buffers of a layer, GiB, the least by forward route: {said}")


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:,.{1 if tokens < 100_000 else 0}f}" if tokens else "-"


def _gib(value: float) -> str:
    """GiB, from one digit behind the point for tens to none for hundreds."""
    gib = value / GIB
    return f"{gib:,.{2 if gib < 10 else 1 if gib < 100 else 0}f}"
