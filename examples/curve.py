"""The loss curve of a training run, as a CSV table and a PNG picture."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import get_type_hints


@dataclass(frozen=True, slots=True)
class Row:
    """One optimizer step."""

    step: int
    loss: float
    """Mean over the valid tokens of the step, nats per byte."""
    grad_norm: float
    tokens: int
    """Tokens of this step, over all ranks."""
    seconds: float
    bytes_sent: int
    """Bytes that rank 0's attention sent in this step."""


def write_csv(rows: list[Row], path: Path) -> None:
    """Write a header of field names and one line per step; replaces the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    temporary.replace(path)


def read_csv(path: Path) -> list[Row]:
    """The rows of a file that `write_csv` wrote; an empty list if there is no file."""
    if not path.exists():
        return []
    column_types = get_type_hints(Row)  # int or float
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return [Row(**{key: column_types[key](x) for key, x in row.items()}) for row in rows]


def draw(rows: list[Row], path: Path, title: str, held_out_loss: float | None = None) -> None:
    """Draw the training loss over the steps, and the held-out loss as a horizontal line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([row.step for row in rows], [row.loss for row in rows], label="training")
    if held_out_loss is not None:
        label = f"held-out text, at the end: {held_out_loss:.3f}"
        axes.axhline(held_out_loss, linestyle="--", color="tab:orange", label=label)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
