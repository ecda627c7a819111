"""Jobs of four ranks with WallFacer, and their references: jobs without it.

A reference has one rank for each sequence that the four ranks compute at a time: one or two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.integrations.deepspeed_jobs import run_ranks

RANKS = 4
Results = dict[str, dict[str, Any]]
"""What rank 0 measured, by case."""


def run_with_and_without(
    worker: str, cases: Mapping[str, Mapping[str, Any]], folder: Path, *imported: str
) -> tuple[Results, Results]:
    """Run all cases with WallFacer and without; return both results.

    Args:
        worker: the script that the ranks run, a file of this folder.
        cases: the input of the script; "wallfacer" is the configuration, which is None in the
            reference, and "reference" holds other keys of the reference that differ.
        imported: see `deepspeed_jobs.python`.
    """
    named = [{"name": name, **case} for name, case in cases.items()]
    actual = _run_job(worker, named, RANKS, folder / "with", imported)
    expected = Results()
    for groups in (1, 2):
        references = [
            case | {"wallfacer": None} | case.get("reference", {})
            for case in named
            if case["wallfacer"]["sequence_parallel_size"] * groups == RANKS
        ]
        if references:
            expected |= _run_job(worker, references, groups, folder / f"without{groups}", imported)
    return actual, expected


def _run_job(
    worker: str, cases: list[dict[str, Any]], ranks: int, folder: Path, imported: Sequence[str]
) -> Results:
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks([str(Path(__file__).with_name(worker)), str(folder)], ranks, imported=imported)
    names = [case["name"] for case in cases]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
