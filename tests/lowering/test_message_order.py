"""Messages of two ranks match: sends and receives have the same rows, in the same order."""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations
from typing import Literal

import pytest

from tests.cases import schedules
from wf_backends.lowering.derivation import Problem, lower
from wf_backends.lowering.program import OWN_MESSAGE_ROWS, RankProgram
from wf_backends.schedule.layout import zigzag
from wf_backends.schedule.mask import CAUSAL, FULL, Band, Mask


@pytest.mark.parametrize("seqlen", (36, 36 * OWN_MESSAGE_ROWS), ids=("short", "own_messages"))
@pytest.mark.parametrize("n", (2, 4, 6, 8, 9))
@pytest.mark.parametrize("queries_walk", (False, True))
@pytest.mark.parametrize("mask", ("full", "causal", "window", "documents"))
def test_every_send_has_its_receive(n, queries_walk, mask, seqlen):
    """In the long sequence ranges of positions are messages of their own."""
    masks = {
        "full": Mask(FULL),
        "causal": Mask(CAUSAL),
        "window": Mask(Band(5, 2)),
        "documents": Mask(CAUSAL, (0, 7 * seqlen // 36, seqlen)),
    }
    layout = zigzag(n, seqlen)
    for name, schedule in schedules(n).items():
        problem = Problem(schedule, layout, layout, masks[mask], queries_walk)
        programs = [lower(problem, rank) for rank in range(n)]
        sent = [rows_by_peer(program, "send") for program in programs]
        received = [rows_by_peer(program, "receive") for program in programs]
        for a, b in permutations(range(n), 2):
            assert sent[a][b] == received[b][a], (name, a, b)


def rows_by_peer(program: RankProgram, way: Literal["send", "receive"]) -> dict[int, list[int]]:
    """Rows of the messages to or from each peer, in the order in which a rank posts them.

    The order is that of `RankProgram`'s docstring.
    """
    parcels = [*getattr(program.walk, way)]
    parcels += [p for round_ in program.steps[0].rounds for p in getattr(round_.fetch, way)]
    before = None
    for step in program.steps:
        parcels += getattr(step.hop, way)
        if before is not None:
            parcels += (*getattr(before.partial, way), *getattr(before.reduce, way))
        parcels += getattr(step.owner, way)
        parcels += [p for round_ in step.rounds for p in getattr(round_.reduce, way)]
        before = step
    if before is not None:
        parcels += (*getattr(before.partial, way), *getattr(before.reduce, way))
    rows = defaultdict[int, list[int]](list)
    for parcel in parcels:
        rows[parcel.peer].append(parcel.num_rows)
    return rows
