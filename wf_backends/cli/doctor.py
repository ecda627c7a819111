"""`wallfacer doctor`: what is installed, what works here, and what mends the rest."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wf_backends.cli.options import AsJson
from wf_backends.cli.tables import print_json
from wf_backends.cluster import check_up


def doctor(as_json: AsJson = False) -> None:
    """Say what is installed and what works here, by trying it; exit code 1 if the core does not.

    Example:

        wallfacer doctor
    """
    findings = list(check_up())
    if as_json:
        print_json([asdict(one) for one in findings])
    else:
        table = Table("", "what", "here", "to mend it")
        for one in findings:
            lacking = "[red]NO[/red]" if one.needed else "[yellow]no[/yellow]"
            sign = "[green]yes[/green]" if one.works else lacking
            table.add_row(sign, *map(escape, (one.name, one.what, one.mend)))
        Console().print(table)
    if any(one.needed and not one.works for one in findings):
        raise typer.Exit(1)
