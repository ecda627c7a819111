"""Calls that differ between the ranks of a sequence: an error on all ranks names the difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import run_threads
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.cluster.presets import one_host
from wf_backends.comm.consistency import texts_with_ranks

RANKS = 3


def refusal_of_attention(comm: Any, change: dict[str, Any]) -> str:
    """The error of this rank where rank 1 changes its config, its dtype or its arguments."""
    rank_change = change if comm.rank == 1 else {}
    options = {"sequence_parallel_size": RANKS, "route": "ring"} | rank_change.get("config", {})
    sp = SequenceParallel(SequenceParallelConfig.from_dict(options), comm)
    x = torch.zeros(1, 8, 4, 8, dtype=rank_change.get("dtype", torch.float32))
    arguments = {"causal": True, "name": "a"} | rank_change.get("arguments", {})
    with pytest.raises(ValueError, match="the ranks do not agree") as refusal:
        sp.attention(x, x, x, **arguments)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arguments": {"causal": False}}, "mask: causal (ranks [0, 2]), full (ranks [1])"),
        (
            {"arguments": {"window_size": (5, -1)}},
            "causal (ranks [0, 2]), window of 5 tokens to the left, 0 to the right (ranks [1])",
        ),
        (
            {"arguments": {"cu_seqlens": (0, 7, 24)}},
            "causal, documents with borders [0, 7, 24] (ranks [1])",
        ),
        (
            {"dtype": torch.float64},
            "dtype: torch.float32 (ranks [0, 2]), torch.float64 (ranks [1])",
        ),
        ({"arguments": {"softmax_scale": 0.5}}, ", 0.5 (ranks [1])"),
        (
            {"config": {"route": "all_gather", "layout": "contiguous"}},
            "config route name: ring (ranks [0, 2]), all_gather (ranks [1]); "
            "config layout: zigzag (ranks [0, 2]), contiguous (ranks [1])",
        ),
        ({"arguments": {"name": "b"}}, "layer 'a' (ranks [0, 2]), layer 'b' (ranks [1])"),
    ],
)
def test_error_shows_the_values_that_differ_with_their_ranks(
    change: dict[str, Any], message: str
) -> None:
    errors = run_threads(RANKS, refusal_of_attention, change)
    assert message in errors[0], errors[0]
    assert errors[0] == errors[1] == errors[2]


def test_long_values_are_shown_from_where_they_differ() -> None:
    ends_with_5, ends_with_6 = (f"{[*range(100)]}, {last}" for last in (5, 6))
    shown = texts_with_ranks(
        [ends_with_5, ends_with_6, ends_with_5], lambda ranks: f"ranks {ranks}"
    )
    assert shown.startswith("... ") and len(shown) < 200
    assert "5 (ranks [0, 2])" in shown and "6 (ranks [1])" in shown


def refusal_in_second_group(comm: Any, difference: str) -> str:
    """The error in the group of global ranks 2 and 3, where rank 3 calls attention otherwise."""
    if comm.rank < 2:
        return ""
    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), comm)
    x = torch.zeros(1, 8, 4, 8)
    differences = {
        "mask": {"causal": True},
        "dropout": {"dropout_p": 2.0},
        "layer": {"name": "b"},
    }
    arguments = {"name": "a"} | (differences[difference] if comm.rank == 3 else {})
    with pytest.raises((ValueError, RuntimeError)) as refusal:
        sp.attention(x, x, x, **arguments)
    return str(refusal.value)


@pytest.mark.parametrize("difference", ["mask", "layer", "dropout"])
def test_error_names_global_ranks_and_ranks_of_the_group(difference: str) -> None:
    error = run_threads(4, refusal_in_second_group, difference)[2]
    assert "lobal ranks [3], ranks [1] of the group" in error, error


def tensors(
    seqlen: int = 8,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """q, k and v of one rank."""
    return [torch.randn(1, seqlen, n, head_dim, dtype=dtype) for n in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"seqlen": 12}, r"q rows must be the shards.*got \[8, 8, 12\]"),
        ({"heads": 8}, r"heads: \[4, 4, 8\]"),
        ({"kv_heads": 4}, r"kv heads: \[2, 2, 4\]"),
        ({"head_dim": 16}, r"head_dim: \[8, 8, 16\]"),
        ({"dtype": torch.float64}, "dtype"),
    ),
)
def test_error_lists_the_shapes_of_all_ranks(change: dict[str, Any], message: str) -> None:
    def rank(comm: Any) -> None:
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=3, route="ring"), comm)
        sp.attention(*tensors(**(change if comm.rank == 2 else {})))

    with pytest.raises(ValueError, match=message):
        run_threads(3, rank)


@pytest.mark.parametrize(
    "difference",
    (
        "config",
        "mask",
        "softcap",
        "sinks",
        "alibi_slopes",
        "position_bias",
        "dropout_p",
        "dropout_seed",
    ),
)
def test_error_names_the_option_that_differs(difference: str) -> None:
    options_of_rank_0 = {
        "mask": {"causal": True},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": torch.zeros(4)},
        "alibi_slopes": {"alibi_slopes": torch.zeros(4)},
        "position_bias": {"position_bias": torch.zeros(4, 3)},
        "dropout_p": {"dropout_p": 0.1},
        "dropout_seed": {"dropout_p": 0.1, "dropout_seed": 3},
    }
    options_of_rank_1 = {"dropout_seed": {"dropout_p": 0.1, "dropout_seed": 4}}

    def rank(comm: Any) -> None:
        route = "all_gather" if comm.rank == 1 and difference == "config" else "ring"
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2, route=route), comm)
        options = (options_of_rank_0, options_of_rank_1)[comm.rank].get(difference, {})
        sp.attention(*tensors(), **options)

    with pytest.raises(ValueError, match=f"the ranks do not agree.*{difference}"):
        run_threads(2, rank)


def test_error_names_the_topology_field_that_differs(tmp_path: Path) -> None:
    def rank(comm: Any) -> None:
        path = tmp_path / f"{comm.rank}.json"
        path.write_text(json.dumps(one_host(2).to_dict() | {"memory_gib": 1 + comm.rank}))
        options = {"sequence_parallel_size": 2, "topology": str(path)}
        sp = SequenceParallel(SequenceParallelConfig.from_dict(options), comm)
        sp.attention(*3 * [torch.zeros(1, 8, 2, 8)])

    with pytest.raises(ValueError, match=r"config its topology memory_gib: 1.0 \(ranks"):
        run_threads(2, rank)


@pytest.mark.parametrize("strategy", (None, "lss"))
@pytest.mark.parametrize("argument", ("tensors", "mask", "dropout"))
def test_arguments_that_one_rank_refuses_are_an_error_on_all(
    strategy: str | None, argument: str
) -> None:
    """No rank waits for the one that refuses, and the group still works after the error."""
    message = {"tensors": "one batch size", "mask": "cu_seqlens", "dropout": "1.1"}[argument]

    def rank(comm: Any) -> str:
        options = {"sequence_parallel_size": 3, "route": "all_gather", "strategy": strategy}
        sp = SequenceParallel(SequenceParallelConfig.from_dict(options), comm)
        q, k, v = tensors()
        bad_calls: dict[str, Any] = {
            "tensors": ((q, k, v[:, :4]), {}),
            "mask": ((q, k, v), {"cu_seqlens": [0, 9, 3]}),
            "dropout": ((q, k, v), {"dropout_p": 1.1}),
        }
        qkv, options = bad_calls[argument] if comm.rank == 1 else ((q, k, v), {})
        with pytest.raises((ValueError, NotImplementedError)) as refusal:
            sp.attention(*qkv, **options)
        sp.attention(q, k, v)
        return str(refusal.value)

    errors = run_threads(3, rank, timeout=20)
    assert message in errors[1]
    assert errors[0] == errors[2] == "the ranks do not agree: ranks [1] refuse their own arguments"


def test_different_calls_at_the_same_time_are_an_error_that_names_them() -> None:
    def rank(comm: Any) -> None:
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), comm)
        sp.attention(*tensors()) if comm.rank else sp.unshard(tensors()[0])

    with pytest.raises(ValueError, match=r"a call that compares batch size, .* \(ranks \[1\]\)"):
        run_threads(2, rank, timeout=20)


IDS = torch.zeros(1, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch_of_rank_1", "message"),
    (
        ({"input_ids": IDS + 1}, "the ranks do not agree.*input_ids"),
        ({"input_ids": IDS, "labels": IDS}, r"do not agree.*keys of the batch: \["),
        (
            {"input_ids": IDS, "labels": IDS[:, :7]},
            r"ranks \[1\] refuse|labels must be a tensor \(1, 8\)",
        ),
    ),
    ids=("other tokens", "another key", "labels too short"),
)
def test_error_names_what_differs_in_the_batch(
    batch_of_rank_1: dict[str, torch.Tensor], message: str
) -> None:
    def rank(comm: Any) -> None:
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=2), comm)
        sp.shard_batch(batch_of_rank_1 if comm.rank else {"input_ids": IDS})

    with pytest.raises(ValueError, match=message):
        run_threads(2, rank, timeout=20)
