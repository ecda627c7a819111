"""How tables and JSON are printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def table_of(
    title: str, rows: Sequence[Mapping[str, str]], text_columns: int = 1, **style: Any
) -> Table:
    """A table with a column for each key of its rows; text is printed as it is, not as markup.

    Args:
        rows: all with the same keys in the same order.
        text_columns: the first ones, on the left. Others hold figures, on the right, not wrapped.
        style: other arguments of rich's Table.
    """
    table = Table(title=escape(title), **style)
    for i, name in enumerate(rows[0]):
        is_figure = i >= text_columns
        table.add_column(name, justify="right" if is_figure else "left", no_wrap=is_figure)
    for row in rows:
        table.add_row(*map(escape, row.values()))
    return table


def wide_console() -> Console:
    """A console for the terminal; else, or on mpirun's pty (without a size), one for any table."""
    has_size = sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns
    return Console() if has_size else Console(force_terminal=False, width=1000)


def print_json(data: object) -> None:
    """Print data to stdout for other programs."""
    print(json.dumps(data, indent=2))
