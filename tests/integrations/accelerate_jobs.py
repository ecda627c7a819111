"""Jobs of four ranks with us, and without us of one rank for each sequence at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.integrations.deepspeed_jobs import run_ranks

RANKS = 4
Results = dict[str, dict[str, Any]]


def run_both(
    worker: str, cases: Mapping[str, Mapping[str, Any]], folder: Path, *imported: str
) -> tuple[Results, Results]:
    """(by four ranks with us, without) what the first rank found, by case.

    Args:
        worker: the script that the ranks run, beside this file.
        cases: as the script knows them, each with its "words" of WallFacer; under "alone" what is
            another without us.
        imported: see `deepspeed_jobs.python`.
    """
    named = [{"name": name, **case} for name, case in cases.items()]
    ours, plain = _job(worker, named, RANKS, folder / "ours", imported), Results()
    for groups in (1, 2):
        some = [c for c in named if c["words"]["sequence_parallel_size"] * groups == RANKS]
        if not some:
            continue
        alone = [case | {"words": None} | case.get("alone", {}) for case in some]
        plain |= _job(worker, alone, groups, folder / f"plain{groups}", imported)
    return ours, plain


def _job(
    worker: str, cases: list[dict[str, Any]], ranks: int, folder: Path, imported: Sequence[str]
) -> Results:
    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks([str(Path(__file__).with_name(worker)), str(folder)], ranks, imported=imported)
    return {
        case["name"]: json.loads((folder / f"{case['name']}.json").read_text()) for case in cases
    }
