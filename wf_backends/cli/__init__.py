"""The console script `wallfacer`. Each command is a file; they need the `cli` extra."""

from __future__ import annotations

import sys

MISSING = ("typer", "rich")


def main() -> None:
    """Run a command. Exit codes: 0 done, 1 something does not work here, 2 bad input or file."""
    try:
        from wf_backends.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in MISSING:
            raise
        sys.exit(f"wallfacer needs {error.name}, which is missing: pip install 'wallfacer[cli]'")
    try:
        app()
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"wallfacer: {error}", file=sys.stderr)
        sys.exit(2)
