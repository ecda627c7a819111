"""The loss curve: rows kept while training, one CSV and one PNG at the end."""

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
    """One line a step under a header of the field names; the file is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    new.replace(path)


def read_csv(path: Path) -> list[Row]:
    """The rows of a file that `write_csv` wrote; none if there is no file."""
    if not path.exists():
        return []
    kinds = get_type_hints(Row)  # int or float
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        return [Row(**{key: kinds[key](text) for key, text in row.items()}) for row in rows]


def draw(rows: list[Row], path: Path, title: str, held_out: float | None = None) -> None:
    """Loss over steps as a picture, with the held-out loss as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([row.step for row in rows], [row.loss for row in rows], label="training")
    if held_out is not None:
        label = f"held-out text, at the end: {held_out:.3f}"
        axes.axhline(held_out, linestyle="--", color="tab:orange", label=label)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
