"""`wallfacer doctor`: what is installed, what works here, and how to mend what does not."""

from __future__ import annotations

import sys
from dataclasses import asdict

import typer
from rich.markup import escape
from rich.table import Table

from wf_backends.cli.options import AsJson, launched_rank
from wf_backends.cli.tables import print_json, wide_console
from wf_backends.cluster import check_up


def doctor(as_json: AsJson = False) -> None:
    """Try what works here and list what is installed; exit code 1 if the core does not work.

    Under a launcher rank 0 prints its findings, another rank only what is broken there.

    Example:

        wallfacer doctor
    """
    findings, rank = list(check_up()), launched_rank()
    broken = [finding for finding in findings if finding.needed and not finding.works]
    if rank:
        for finding in broken:
            print(f"rank {rank}: {finding.name}: {finding.what}", file=sys.stderr)
    elif as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        table = Table("", "what", "here", "to mend it")
        for finding in findings:
            missing = "[red]NO[/red]" if finding.needed else "[yellow]no[/yellow]"
            sign = "[green]yes[/green]" if finding.works else missing
            table.add_row(sign, *map(escape, (finding.name, finding.what, finding.mend)))
        wide_console().print(table)
    if broken:
        raise typer.Exit(1)
