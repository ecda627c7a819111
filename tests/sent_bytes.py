"""The bytes that a rank sends, by message label, derived from its program.

Labels are those of runtime/runner.py: what a communicator counts must be the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from wf_backends.lowering import Parcel, RankProgram, RowBytes


def bytes_sent(program: RankProgram, rows: RowBytes, name: str) -> dict[str, int]:
    """Message label -> the bytes that the program's rank sends in the pass called `name`."""

    def count(parcels: Iterable[Parcel]) -> int:
        return sum(p.num_rows for p in parcels if p.peer != program.rank)

    rounds = [round_ for step in program.steps for round_ in step.rounds]
    fetched = (parcel for r in rounds for parcel in (*r.fetch.send, *r.pass_on.send))
    results = (parcel for r in rounds for parcel in (*r.pass_back.send, *r.reduce.send))
    gathered = count(program.walk.send) * rows.walk.gathered + count(fetched) * rows.stay.gathered
    sent, partials = {f"{name} gather": gathered}, 0
    for index, step in enumerate(program.steps):
        walkers = count((*step.hop.send, *step.owner.send)) * rows.walk.row
        sent[f"{name} step {index}"] = walkers + partials
        partials = count((*step.partial.send, *step.reduce.send)) * rows.walk.partial  # sent next
    sent[f"{name} reduce"] = count(results) * rows.stay.partial + partials
    return {label: num_bytes for label, num_bytes in sent.items() if num_bytes}
