"""What ColossalAI's own ring_attn gets wrong (ours does not), and what a user may get wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.colossalai_jobs import (
    Results,
    assert_gradients,
    assert_losses,
    assert_tensors,
    needs_colossalai,
    run_cases,
)

pytestmark = [needs_colossalai, pytest.mark.processes]

RING = {"words": {"sequence_parallel_size": 4, "route": "ring"}}
BY_CONFIG = {
    "ring_attn": {"run": "their_form", "tp_size": 1, "mode": "ring_attn"},
    "ring_attn_tp": {"run": "their_form", "tp_size": 2, "mode": "ring_attn"},
    "all_to_all": {"run": "their_form", "tp_size": 1, "mode": "all_to_all"},
}
PLAIN = (
    "large_logits",
    "same_size",
    "key_bytes",
    "half_precision_loss",
    "padded_labels",
    "attention_alone",
    "own_model",
    "refused",
    "loaders",
    "whole_logits",
)
DOUBLE_RINGS = {f"inner_{inner}": inner for inner in (2, 4)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """One job of 4 ranks over everything but double rings."""
    folder: Path = tmp_path_factory.mktemp("faults")
    cases: list[dict[str, Any]] = [{"name": name, "run": name} | RING for name in PLAIN]
    words = {"words": {"route": "ring"}}
    cases += [{"name": name} | case | words for name, case in BY_CONFIG.items()]
    return run_cases(cases, 4, folder)


@pytest.fixture(scope="module")
def double_rings(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """One job of 8 ranks, where ColossalAI asks for ranks that do not exist, or hangs."""
    cases = [
        {
            "name": name,
            "run": "attention_alone",
            "words": {
                "sequence_parallel_size": 8,
                "route": {"name": "double_ring", "inner": inner},
            },
        }
        for name, inner in DOUBLE_RINGS.items()
    ]
    return run_cases(cases, 8, tmp_path_factory.mktemp("double"))


@pytest.mark.parametrize("name", BY_CONFIG)
def test_their_model_test_passes_with_our_policy(results: Results, name: str) -> None:
    assert_losses(results[name])
    assert_gradients(results[name])


def test_their_attention_test_passes(results: Results) -> None:
    result = results["attention_alone"]
    assert_tensors(result["gradients"], result["expected"]["gradients"], 1e-5)


@pytest.mark.parametrize("name", DOUBLE_RINGS)
def test_a_double_ring_need_not_be_square(double_rings: Results, name: str) -> None:
    result = double_rings[name]
    assert_tensors(result["gradients"], result["expected"]["gradients"], 1e-5)


def test_large_logits_do_not_overflow(results: Results) -> None:
    assert_losses(results["large_logits"])
    # scores of some hundreds are known to 1e-5 in float32, with or without us
    assert_gradients(results["large_logits"], 1e-4)


def test_batches_of_one_size_and_other_shapes_keep_their_own_documents(results: Results) -> None:
    assert_losses(results["same_size"])


def test_key_heads_are_sent_as_they_are(results: Results) -> None:
    """2 key heads of 4: half the bytes, exactly those of the ring."""
    sent = results["key_bytes"]
    keys_and_values, layers, tokens, head_dim, float32 = 2, 2, 24, 8, 4
    walked = (
        9  # of 4 ranks x 3 hops of the zigzag, in shards: a quarter is seen by nobody further on
    )
    assert sent[4] == 2 * sent[2]
    assert sent[2] == keys_and_values * layers * (tokens // 4) * walked * 2 * head_dim * float32


def test_the_loss_of_a_bfloat16_model_is_float32(results: Results) -> None:
    result = results["half_precision_loss"]
    assert result["dtypes"] == ["torch.float32", "torch.bfloat16"]
    assert_losses(result, 1e-6)


def test_labels_of_padding_count_for_nothing(results: Results) -> None:
    labels, given = results["padded_labels"]["labels"], results["padded_labels"]["given"]
    assert labels.shape == (1, 24)
    assert torch.equal(labels[:, :22], given[:, 1:])
    assert labels[:, 22:].tolist() == [[-100, -100]]


def test_logits_are_whole_in_evaluation(results: Results) -> None:
    assert_gradients(results["whole_logits"])


def test_a_policy_for_ones_own_model_takes_ten_lines(results: Results) -> None:
    assert_losses(results["own_model"])
    assert_gradients(results["own_model"])


def test_ranks_of_a_sequence_read_the_same_samples(results: Results) -> None:
    for name, read in results["loaders"].items():
        assert read[0] == read[1] and read[2] == read[3], name
        assert sorted(read[0] + read[2]) == list(range(8)), name


@pytest.mark.parametrize(
    ("what", "words"),
    {
        "other batches": ["input_ids", "prepare_dataloader"],
        "other images": ["the ranks do not agree", "pixel_values", "prepare_dataloader"],
        "other size": ["sequence_parallel_size 4", "sp_size 2"],
        "world": ["sequence_parallel_size 3", "4 ranks"],
        "group": ["sequence_parallel_size", "4 ranks", "got 3"],
        "pipeline": ["OwnModel", "pp_size=1", "has a policy for"],
        "zero bubble": ["zbv", "1f1b", "interleaved"],
        "cache": ["past_key_values"],
        "tuple": ["return_dict=False"],
        "carrier": ["sequence_parallelism_mode", "split_gather", "ring_attn"],
    }.items(),
)
def test_what_a_user_gets_wrong_is_named(results: Results, what: str, words: list[str]) -> None:
    for word in words:
        assert word in results["refused"][what]
