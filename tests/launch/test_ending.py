"""Which faults a rank reports that ends by an error."""

from __future__ import annotations

import sys

import pytest
from torch.distributed import HashStore

from wf_backends.comm import Board
from wf_backends.launch import ending


@pytest.mark.parametrize(
    ("error", "ranks", "reported"),
    [
        (RuntimeError("Timed out waiting"), [0, 1, 2], False),
        (RuntimeError("Timed out waiting"), [0, 2], True),  # rank 1 is stopped; torch names no rank
        (ValueError("of the configuration"), [0, 2], False),  # rank 1 will raise it, too
    ],
)
def test_a_fault_is_reported_if_ranks_do_not_answer(
    monkeypatch: pytest.MonkeyPatch, error: Exception, ranks: list[int], reported: bool
):
    board = Board(HashStore())
    for rank in ranks:
        board.write("fault", rank, {"ended": str(error)})
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(ending, "PEER_ERRORS_S", 0.05)
    for rank in ranks:
        ending._report_errors(board, rank, 3)
    assert board.reported == reported
