"""`wallfacer doctor`: what is installed, what works here, and what mends the rest."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wf_backends.cli.options import AsJson
from wf_backends.cli.tables import print_json
from wf_backends.cluster import Finding, check_up


def doctor(as_json: AsJson = False) -> None:
    """Say what is installed and what works here, by trying it; exit code 1 if the core does not.

    Example:

        wallfacer doctor
    """
    findings = list(check_up())
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        Console().print(table(findings))
    if any(finding.needed and not finding.works for finding in findings):
        raise typer.Exit(1)


def table(findings: list[Finding]) -> Table:
    """One line for each."""
    found = Table("", "what", "here", "to mend it")
    for finding in findings:
        sign = "[green]yes[/green]" if finding.works else "[yellow]no[/yellow]"
        if finding.needed and not finding.works:
            sign = "[red]NO[/red]"
        found.add_row(sign, *map(escape, (finding.name, finding.what, finding.mend)))
    return found
