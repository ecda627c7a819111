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


def make_budget(
    name: str, data_parallel_size: int, plans: Sequence[Plan], priced: Request, asked: Request
) -> dict[str, Any]:
    """A rank's memory in training a model with the first of the plans, as data: bytes and tokens.

    Args:
        name: of the model.
        priced: the request that the plans answer; its ranks may stand for more, those of `asked`.
    """
    workload, shape = asked.workload, asked.workload.shape
    sizes, keys = read_model(name, shape.itemsize), ("heads", "kv_heads", "head_dim", "value_dim")
    heads = {key: getattr(shape, key) for key in keys}  # options override the model's
    if not heads.items() <= sizes.items():
        heads |= {"kinds": (), "last_norm": None, "uncounted": "options change its heads"}
    model = Decoder(**sizes | heads)
    rows = priced.workload.seqlen / priced.topology.size * shape.batch
    bytes_per_row = plans[0].cost.memory_bytes / rows
    training = Training(model, asked.topology.size, bytes_per_row, shape.batch, data_parallel_size)
    budget = report(training, workload.seqlen, asked.memory_limit)
    buffers = {  # forward route -> bytes of the plan that needs least, which comes last
        plan.choice.forward.route["name"]: plan.cost.memory_bytes / rows * budget["tokens"]
        for plan in sorted(plans, key=lambda plan: -plan.cost.memory_bytes)
    }
    return budget | {"attention_buffers": buffers}


def show_budget(name: str, budget: dict[str, Any], console: Console) -> None:
    """Print model states, activations, the longest sequence that fits, and attention's buffers."""
    model = budget["model"]
    console.print(
        f"[bold]A rank's memory in training:[/bold] {escape(name)}, "
        f"{model['parameters'] / 1e9:,.3g} B parameters of {model['itemsize']} bytes, "
        f"Adam, {budget['ranks']} ranks"
    )
    for title, rows, text_columns in tables(budget):
        console.print(table_of(title, rows, text_columns, title_justify="left"))
    buffers = sorted(budget["attention_buffers"].items(), key=lambda route_bytes: route_bytes[1])
    text = ", ".join(f"{route} {gib(nbytes)}" for route, nbytes in buffers)
    title = "Attention buffers of a layer, GiB, by forward route and its fastest backward"
    console.print(f"{title}: {text}")
