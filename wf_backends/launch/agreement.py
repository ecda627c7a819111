"""Ranks that differ before they meet, found on the job's board: in messages they would hang."""

from __future__ import annotations

from collections.abc import Sequence

from wf_backends.comm import fingerprint, job_board


def refuse_other_value(topic: str, value: object, ranks: Sequence[int], rank: int) -> None:
    """Compare a value with those of this rank's two neighbours, without waiting for them.

    The first calls of all ranks are compared, then the second, and so on. Each rank writes first
    and then reads, so that of two neighbours that differ at least the later one raises.

    Args:
        topic: what the value is, for the error.
        value: JSON keeps it as it is.
        ranks: the global ranks of the processes that make this call; this one's is ranks[rank].

    Raises:
        ValueError: if a neighbour that came before has another value.
    """
    board = job_board()
    if board is None:
        return
    key, me = f"{topic} {fingerprint([*ranks])}", ranks[rank]
    values = [*(board.read(key, me) or ()), value]  # of this rank, in order
    board.write(key, me, values)
    for neighbour in (ranks[rank - 1], ranks[(rank + 1) % len(ranks)]):
        others = board.read(key, neighbour) or ()
        if len(others) >= len(values) and others[len(values) - 1] != value:
            raise ValueError(
                f"the ranks do not agree: {topic}: {value} on rank {me}, "
                f"{others[len(values) - 1]} on rank {neighbour}. Give all ranks the same, "
                "in the same order of calls; a rank that calls alone needs a group of its own"
            )
