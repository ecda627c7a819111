"""Ranks that differ before they meet: each compares its value with those of its neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from tests.helpers import run_processes
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Board, make_comm
from wf_backends.launch import agreement, refuse_other_value


@pytest.mark.parametrize("other", [0, 1, 2, 3])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_of_two_neighbours_that_differ_in_a_later_call_one_is_told(
    monkeypatch: pytest.MonkeyPatch, other: int, order: tuple[int, ...]
) -> None:
    board, errors = Board(HashStore()), []
    monkeypatch.setattr(agreement, "job_board", lambda: board)
    for rank in order:
        refuse_other_value("size", 4, (4, 5, 6, 7), rank)  # the first call
        try:
            refuse_other_value("size", 1 if rank == other else 4, (4, 5, 6, 7), rank)
        except ValueError as error:
            errors.append(str(error))
    assert errors and all(f"1 on rank {4 + other}" in error for error in errors), errors


def test_groups_of_other_ranks_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(HashStore())
    monkeypatch.setattr(agreement, "job_board", lambda: board)
    refuse_other_value("size", 2, (0, 1), 0)
    refuse_other_value("size", 4, (0, 1, 2, 3), 1)
    refuse_other_value("size", 1, (1,), 0)


def make_sequence_parallels(_: Any, size_of_rank_1: int, has_comm: bool = False) -> str:
    """One of one rank's own group on rank 1 alone, one of all ranks, one that differs on rank 1,
    whose group is None or a communicator."""
    rank = dist.get_rank()
    own_groups = [dist.new_group([rank]) for rank in range(3)]
    if rank == 1:
        SequenceParallel(SequenceParallelConfig(), own_groups[1])
    SequenceParallel(SequenceParallelConfig(sequence_parallel_size=3))
    dist.barrier()
    if rank == 1:
        dist.barrier()  # it comes last
    try:
        size = size_of_rank_1 if rank == 1 else 3
        config = SequenceParallelConfig(sequence_parallel_size=size)
        SequenceParallel(config, make_comm() if has_comm else None)
        return ""
    except ValueError as error:
        return str(error)
    finally:
        if rank != 1:
            dist.barrier()


@pytest.mark.processes
@pytest.mark.parametrize("has_comm", [False, True])
def test_a_rank_whose_sequence_parallel_size_is_1_is_named_at_once(has_comm: bool) -> None:
    """It would wait for no one, and the others for it until the timeout."""
    errors = run_processes(3, make_sequence_parallels, 1, has_comm)
    assert errors[0] == errors[2] == ""
    assert "sequence_parallel_size: 1 on rank 1, 3 on rank 0." in errors[1]


@pytest.mark.processes
def test_ranks_of_one_size_are_not_refused() -> None:
    assert run_processes(3, make_sequence_parallels, 3) == [""] * 3
