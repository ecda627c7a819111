"""The second part of `wallfacer plan --model FOLDER --memory-gib 80`: a rank's whole memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wf_backends.budget import STAGES, Decoder, Options, Training
from wf_backends.cli.models import read_model
from wf_backends.planner import Plan, Request

GIB = 2**30
CHECKPOINTS = MappingProxyType({"none": "none", "device": "on device", "host": "on host"})
OPTION_NAMES = ("checkpoints", "MLP, loss")
STAGE_NAMES = tuple(f"ZeRO {stage}" for stage in STAGES)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a rank of `training` holds, beside the memory that it has."""

    name: str
    training: Training
    seqlen: int
    memory_bytes: float
    routes: Mapping[str, float]
    """Bytes of one layer's attention buffers, the least by forward route."""

    @property
    def options(self) -> Iterator[Options]:
        """Everything that is compared; tiles are as long as the hidden size is wide."""
        for checkpoints in ("none", "device", "host"):
            yield Options(checkpoints)
            yield Options(checkpoints, tile=self.training.model.hidden)


def budget_of(
    name: str, data_parallel_size: int, plans: Sequence[Plan], counted: Request, asked: Request
) -> Budget:
    """The budget of a model under the first of the plans.

    Args:
        name: of the model.
        counted: the request that the plans answer; its ranks may stand for more.

    Raises:
        ValueError, NotImplementedError: if the model's config does not tell its sizes, or is of a
            mixture of experts.
    """
    work, ranks = asked.workload, asked.topology.size
    sizes, shape = read_model(name, sizes=True), work.shape
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    model = Decoder(**(sizes | heads), itemsize=shape.itemsize)
    rows = counted.workload.seqlen / counted.topology.size * shape.batch
    each = plans[0].cost.memory_bytes / rows
    training = Training(model, ranks, each, shape.batch, data_parallel_size)
    tokens, routes = training.tokens(work.seqlen), dict[str, float]()
    for plan in plans:
        route, needs = plan.forward.placed.route["name"], plan.cost.memory_bytes / rows * tokens
        routes[route] = min(needs, routes.get(route, needs))
    return Budget(name, training, work.seqlen, asked.memory_limit, routes)


def show(budget: Budget, console: Console) -> None:
    """Print states, activations, the longest sequence that fits, and attention's buffers."""
    training = budget.training
    ranks = training.sequence_parallel_size * training.data_parallel_size
    console.print(
        f"[bold]A rank's memory in training:[/bold] {escape(budget.name)}, "
        f"{training.model.parameters / 1e9:,.3g} B parameters of {training.model.itemsize} bytes, "
        f"Adam, {ranks} ranks"
    )
    for table in (_states(training), _activations(budget), _longest(budget)):
        console.print(table)
    routes = sorted(budget.routes.items(), key=lambda one: one[1])
    said = ", ".join(f"{route} {_gib(needs)}" for route, needs in routes)
    console.print(f"Attention buffers of a layer, GiB, the least by forward route: {said}")


def to_json(budget: Budget) -> dict[str, Any]:
    """The same as data, in bytes and tokens."""
    training, seqlen = budget.training, budget.seqlen
    states = [training.states(stage) for stage in STAGES]
    return {
        "model": asdict(training.model),
        "ranks": training.sequence_parallel_size * training.data_parallel_size,
        "tokens": training.tokens(seqlen),
        "memory_bytes": budget.memory_bytes,
        "states": [{"stage": stage, **asdict(states[stage])} for stage in STAGES],
        "attention_buffers": dict(budget.routes),
        "choices": [_choice(budget, options) for options in budget.options],
    }


def _choice(budget: Budget, options: Options) -> dict[str, Any]:
    """One way to keep memory low: activations, and by stage bytes and the longest sequence."""
    training, limit = budget.training, budget.memory_bytes
    found = training.activations(budget.seqlen, options)
    return {
        **asdict(options),
        "activations": asdict(found) | {"peak": found.peak},
        "device_bytes": [training.device_bytes(budget.seqlen, s, options) for s in STAGES],
        "longest": [training.longest(limit, stage, options) for stage in STAGES],
    }


def _states(training: Training) -> Table:
    table = _table("Parameters, gradients, optimizer: GiB", "", *STAGE_NAMES)
    found = [training.states(stage) for stage in STAGES]
    rows = {
        "parameters": [one.parameters for one in found],
        "gradients": [one.gradients for one in found],
        "optimizer states": [one.optimizer for one in found],
        "buckets, gathered parameters": [one.buffers for one in found],
        "all beside activations": [one.backward for one in found],
        "all at the optimizer's step": [one.at_step for one in found],
    }
    for name, figures in rows.items():
        table.add_row(name, *map(_gib, figures))
    return table


def _activations(budget: Budget) -> Table:
    """What all layers keep, and what is there beside it while the backward is at one place."""
    training = budget.training
    names = "kept", "attention", "MLP", "loss", "peak", "host"
    title = f"Activations of a rank's {training.tokens(budget.seqlen):,} tokens: GiB"
    table = _table(title, *OPTION_NAMES, *names)
    for options in budget.options:
        found = training.activations(budget.seqlen, options)
        figures = found.kept, found.attention, found.mlp, found.loss, found.peak, found.host
        table.add_row(*_words(options), *map(_gib, figures))
    return table


def _longest(budget: Budget) -> Table:
    training, limit = budget.training, budget.memory_bytes
    title = f"The longest sequence that fits {_gib(limit)} GiB a rank: thousands of tokens"
    table = _table(title, *OPTION_NAMES, *STAGE_NAMES, "host GiB")
    for options in budget.options:
        longest = [training.longest(limit, stage, options) for stage in STAGES]
        host = training.activations(max(longest), options).host
        tokens = (f"{one / 1000:,.{1 if one < 100_000 else 0}f}" if one else "-" for one in longest)
        table.add_row(*_words(options), *tokens, _gib(host))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in ("", *OPTION_NAMES) else "right")
    return table


def _words(options: Options) -> tuple[str, str]:
    return CHECKPOINTS[options.checkpoints], "tiles" if options.tile else "whole"


def _gib(value: float) -> str:
    """GiB, from one digit behind the point for tens to none for hundreds."""
    gib = value / GIB
    return f"{gib:,.{2 if gib < 10 else 1 if gib < 100 else 0}f}"
