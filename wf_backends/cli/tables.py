"""How tables are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def table_of(title: str, rows: Sequence[Mapping[str, str]], words: int = 1, **look: Any) -> Table:
    """A table with a column for each key of its rows.

    Args:
        rows: all with the same keys, in the same order.
        words: how many columns, the first ones, are words, on the left. Figures are on the right,
            they and their names in one line.
        look: what else rich's Table takes.
    """
    table = Table(title=title, **look)
    for place, name in enumerate(rows[0]):
        is_figure = place >= words
        table.add_column(name, justify="right" if is_figure else "left", no_wrap=is_figure)
    for row in rows:
        table.add_row(*row.values())
    return table


def console_for(table: Table) -> Console:
    """The terminal; in a pipe or a file, a console that is wide enough for the table."""
    console = Console()
    if console.is_terminal:
        return console
    needed = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    return Console(width=max(needed, console.width))
