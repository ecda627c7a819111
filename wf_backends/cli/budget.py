"""The second part of `wallfacer plan --model FOLDER --memory-gib 80`: a rank's whole memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from wf_backends.budget import Decoder, Training, gib, report, tables
from wf_backends.cli.readers import read_model
from wf_backends.cli.tables import table_of
from wf_backends.planner import Plan, Request


def budget_of(
    name: str, data_parallel_size: int, plans: Sequence[Plan], counted: Request, asked: Request
) -> dict[str, Any]:
    """The budget of a model under the first of the plans as data, in bytes and tokens.

    Args:
        name: of the model.
        counted: the request that the plans answer; its ranks may stand for more.
    """
    work, shape = asked.workload, asked.workload.shape
    sizes = read_model(name, sizes=True)  # those of the heads may have been given beside the name
    sizes |= {name: getattr(shape, name) for name in ("heads", "kv_heads", "head_dim", "value_dim")}
    model = Decoder(**sizes, itemsize=shape.itemsize)
    rows = counted.workload.seqlen / counted.topology.size * shape.batch
    each = plans[0].cost.memory_bytes / rows
    training = Training(model, asked.topology.size, each, shape.batch, data_parallel_size)
    found, routes = report(training, work.seqlen, asked.memory_limit), dict[str, float]()
    for plan in plans:
        route, needs = plan.choice.forward.route["name"], plan.cost.memory_bytes / rows
        routes[route] = min(needs * found["tokens"], routes.get(route, needs * found["tokens"]))
    return found | {"attention_buffers": routes}


def show_budget(name: str, budget: dict[str, Any], console: Console) -> None:
    """Print states, activations, the longest sequence that fits, and attention's buffers."""
    model = budget["model"]
    console.print(
        f"[bold]A rank's memory in training:[/bold] {escape(name)}, "
        f"{model['parameters'] / 1e9:,.3g} B parameters of {model['itemsize']} bytes, "
        f"Adam, {budget['ranks']} ranks"
    )
    for title, rows, words in tables(budget):
        console.print(table_of(title, rows, words, title_justify="left"))
    routes = sorted(budget["attention_buffers"].items(), key=lambda one: one[1])
    said = ", ".join(f"{route} {gib(needs)}" for route, needs in routes)
    console.print(f"Attention buffers of a layer, GiB, the least by forward route: {said}")
