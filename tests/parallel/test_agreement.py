"""What the ranks of one sequence do differently is told in words, on all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm.consistency import texts_with_ranks

RANKS = 3


def attend(comm: Any, change: dict[str, Any]) -> str:
    """The error of a rank in a call that rank 1 makes otherwise."""
    mine = change if comm.rank == 1 else {}
    words = {"sequence_parallel_size": RANKS, "route": "ring"} | mine.get("words", {})
    sp = SequenceParallel(SequenceParallelConfig.from_dict(words), comm)
    x = torch.zeros(1, 8, 4, 8, dtype=mine.get("dtype", torch.float32))
    with pytest.raises(ValueError, match="the ranks do not agree") as refusal:
        sp.attention(x, x, x, **{"causal": True, "name": "a"} | mine.get("call", {}))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"call": {"causal": False}}, "mask: causal (ranks [0, 2]), full (ranks [1])"),
        (
            {"call": {"window_size": (5, -1)}},
            "causal (ranks [0, 2]), window of 5 tokens to the left, 0 to the right (ranks [1])",
        ),
        (
            {"call": {"cu_seqlens": (0, 7, 24)}},
            "causal, documents with borders [0, 7, 24] (ranks [1])",
        ),
        (
            {"dtype": torch.float64},
            "dtype: torch.float32 (ranks [0, 2]), torch.float64 (ranks [1])",
        ),
        ({"call": {"softmax_scale": 0.5}}, ", 0.5 (ranks [1])"),
        (
            {"words": {"route": "all_gather", "layout": "contiguous"}},
            "config route name: ring (ranks [0, 2]), all_gather (ranks [1]); "
            "config layout: zigzag (ranks [0, 2]), contiguous (ranks [1])",
        ),
        ({"call": {"name": "b"}}, "layer 'a' (ranks [0, 2]), layer 'b' (ranks [1])"),
    ],
)
def test_what_differs_is_told_in_words(change: dict[str, Any], says: str) -> None:
    told = run_threads(RANKS, attend, change)
    assert says in told[0], told[0]
    assert told[0] == told[1] == told[2]


def test_long_words_are_shown_from_where_they_differ() -> None:
    one, other = (f"{[*range(100)]}, {last}" for last in (5, 6))
    told = texts_with_ranks([one, other, one], lambda ranks: f"ranks {ranks}")
    assert told.startswith("... ") and len(told) < 200
    assert "5 (ranks [0, 2])" in told and "6 (ranks [1])" in told


def leave_out(comm: Any, skips: bool, names: bool) -> list[Any]:
    """The errors of a rank in a stack of layers, of which rank 1 leaves out the second."""
    config = SequenceParallelConfig(sequence_parallel_size=comm.size, route="ring")
    sp = SequenceParallel(config, comm)
    x = torch.zeros(1, 8, 4, 8)
    for index in range(4):
        if skips and comm.rank == 1 and index == 1:
            continue
        x = x + sp.attention(x, x, x, name=f"layers.{index}" if names else None)
    return []


def test_a_rank_that_leaves_out_a_layer_is_told_by_name() -> None:
    with pytest.raises(ValueError, match=r"layer 'layers.1' \(ranks \[0, 2\]\), layer 'layers.2'"):
        run_threads(RANKS, leave_out, True, True)
    assert run_threads(RANKS, leave_out, False, True) == [[]] * RANKS


@pytest.mark.parametrize("after", ["shard_batch", "unshard"])
def test_a_call_without_a_name_that_is_left_out_in_evaluation_is_told_by_what_follows(
    after: str,
) -> None:
    """A rank that left one out takes its next calls for those before, and has one too few."""

    def rank(comm: Any, skips: bool) -> None:
        config = SequenceParallelConfig(sequence_parallel_size=comm.size, route="ring")
        sp = SequenceParallel(config, comm)
        ids = torch.zeros(1, 24, dtype=torch.int64)
        x = sp.shard_batch({"input_ids": ids})["input_ids"][..., None, None].repeat(1, 1, 4, 8)
        x = x.float()
        for index in range(3):
            if not (skips and comm.rank == 1 and index == 1):
                x = sp.attention(x, x, x)
        sp.unshard(x) if after == "unshard" else sp.shard_batch({"input_ids": ids})

    with pytest.raises(ValueError, match="A rank that leaves out a call"):
        run_threads(RANKS, rank, True)
    run_threads(RANKS, rank, False)


WORDS = [{"route": "ring"}, {"ulysses_degree": 2}, {"ulysses_degree": 2, "ulysses_chunks": 2}]


@pytest.mark.parametrize("words", [*WORDS, {"strategy": "lss"}])
@pytest.mark.parametrize("order", [(1, 0), (1,)], ids=["another order", "not at all"])
def test_backwards_in_another_order_are_told_by_name(words: dict[str, Any], order: Any) -> None:
    """Messages of one backward are never taken for those of another, though they look alike."""

    def rank(comm: Any, order: tuple[int, ...]) -> None:
        config = SequenceParallelConfig.from_dict({"sequence_parallel_size": 2} | words)
        sp = SequenceParallel(config, comm)
        x = torch.zeros(1, 8, 4, 8, requires_grad=True)
        outs = [sp.attention(x, x, x, name=name) for name in "ab"]
        for at in order if comm.rank == 1 else (0, 1):
            outs[at].sum().backward()

    told = r"layer '[ab]', backward of attention call \d, .* layer '[ab]', backward of"
    with pytest.raises(RuntimeError, match=told):
        run_threads(2, rank, order)
    run_threads(2, rank, (0, 1))


def in_the_second_group(comm: Any, change: str) -> str:
    """The error of a rank of [2, 3], where rank 3 makes another call, or none at all."""
    if comm.rank < 2:
        return ""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), comm)
    x = torch.zeros(1, 8, 4, 8)
    with pytest.raises((ValueError, RuntimeError)) as refusal:
        wrong = {"mask": {"causal": True}, "dropout": {"dropout_p": 2.0}}.get(change, {})
        sp.attention(
            x, x, x, **wrong if comm.rank == 3 else {}, name=f"{comm.rank}"[: change == "layer"]
        )
    return str(refusal.value)


@pytest.mark.parametrize("change", ["mask", "layer", "dropout"])
def test_ranks_are_named_as_the_job_numbers_them(change: str) -> None:
    told = run_threads(4, in_the_second_group, change)[2]
    assert "lobal ranks [3], ranks [1] of the group" in told, told
