"""How tables and JSON are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def table_of(title: str, rows: Sequence[Mapping[str, str]], words: int = 1, **look: Any) -> Table:
    """A table with a column for each key of its rows; nothing in it is markup.

    Args:
        rows: all with the same keys, in the same order.
        words: how many columns, the first ones, are words, on the left. Figures are on the right,
            they and their names in one line.
        look: what else rich's Table takes.
    """
    table = Table(title=escape(title), **look)
    for place, name in enumerate(rows[0]):
        is_figure = place >= words
        table.add_column(name, justify="right" if is_figure else "left", no_wrap=is_figure)
    for row in rows:
        table.add_row(*map(escape, row.values()))
    return table


def wide_console() -> Console:
    """The terminal; in a pipe or a file, a console that is wide enough for any table."""
    return Console() if sys.stdout.isatty() else Console(width=1000)


def print_json(words: object) -> None:
    """To stdout, for programs to read."""
    print(json.dumps(words, indent=2))
