"""What ColossalAI's own ring_attn gets wrong is right with WallFacer; errors of users are named."""

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

RING = {"wallfacer": {"sequence_parallel_size": 4, "route": "ring"}}
MODEL_TESTS = {
    "ring_attn": {"run": "colossalai_model_test", "tp_size": 1, "mode": "ring_attn"},
    "ring_attn_tp": {"run": "colossalai_model_test", "tp_size": 2, "mode": "ring_attn"},
    "all_to_all": {"run": "colossalai_model_test", "tp_size": 1, "mode": "all_to_all"},
}
RUNS_ON_A_RING = (
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
    "sharded_optimizer",
)
WHOLE_TP_LOGITS = {
    "name": "whole_tp_logits",
    "run": "whole_logits",
    "wallfacer": {"sequence_parallel_size": 2, "route": "ring"},
    "options": {"tp_size": 2, "parallel_output": False},
}
DOUBLE_RINGS = {f"inner_{inner}": inner for inner in (2, 4)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of one job of 4 ranks over all cases but double rings."""
    folder: Path = tmp_path_factory.mktemp("faults")
    cases: list[dict[str, Any]] = [{"name": name, "run": name} | RING for name in RUNS_ON_A_RING]
    ring = {"wallfacer": {"route": "ring"}}
    cases += [{"name": name} | case | ring for name, case in MODEL_TESTS.items()]
    cases.append(WHOLE_TP_LOGITS)
    return run_cases(cases, 4, folder)


@pytest.fixture(scope="module")
def double_rings(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of one job of 8 ranks, in which ColossalAI names ranks that do not exist, or hangs."""
    cases = [
        {
            "name": name,
            "run": "attention_alone",
            "wallfacer": {
                "sequence_parallel_size": 8,
                "route": {"name": "double_ring", "inner": inner},
            },
        }
        for name, inner in DOUBLE_RINGS.items()
    ]
    return run_cases(cases, 8, tmp_path_factory.mktemp("double"))


@pytest.mark.parametrize("name", MODEL_TESTS)
def test_colossalai_model_test_passes_with_wallfacers_policy(results: Results, name: str) -> None:
    assert_losses(results[name])
    assert_gradients(results[name], in_parts=MODEL_TESTS[name]["tp_size"] > 1)


def test_colossalai_attention_test_passes(results: Results) -> None:
    result = results["attention_alone"]
    assert_tensors(result["gradients"], result["expected"]["gradients"], 1e-5)


@pytest.mark.parametrize("name", DOUBLE_RINGS)
def test_double_rings_that_are_not_square_have_the_dense_gradients(
    double_rings: Results, name: str
) -> None:
    result = double_rings[name]
    assert_tensors(result["gradients"], result["expected"]["gradients"], 1e-5)


def test_large_logits_do_not_overflow(results: Results) -> None:
    assert_losses(results["large_logits"])
    # scores of some hundreds have an error of 1e-5 in float32
    assert_gradients(results["large_logits"], 1e-4)


def test_batches_of_equal_size_and_other_shapes_have_their_own_documents(results: Results) -> None:
    assert_losses(results["same_size"])


def test_shared_key_heads_are_not_repeated_before_they_are_sent(results: Results) -> None:
    """2 key heads of 4 query heads are half the bytes of 4, as many as the ring needs.

    A causal zigzag ring of 4 ranks forwards 9 shards in all: 4 x 3, less the quarter that no
    later rank sees.
    """
    sent = results["key_bytes"]
    keys_and_values, layers, rows_of_shard, head_dim, float32 = 2, 2, 24 // 4, 8, 4
    bytes_per_head_and_shard = keys_and_values * layers * rows_of_shard * head_dim * float32
    assert sent[2] == 9 * 2 * bytes_per_head_and_shard
    assert sent[4] == 2 * sent[2]


def test_the_loss_of_a_bfloat16_model_is_float32(results: Results) -> None:
    result = results["half_precision_loss"]
    assert result["dtypes"] == ["torch.float32", "torch.bfloat16"]
    assert_losses(result, 1e-6)


def test_labels_of_padding_are_ignored(results: Results) -> None:
    """23 tokens: their last one and the padded one have no label."""
    labels, original = (results["padded_labels"][key] for key in ("gathered", "original"))
    assert labels.shape == (1, 24)
    assert torch.equal(labels[:, :22], original[:, 1:])
    assert labels[:, 22:].tolist() == [[-100, -100]]


@pytest.mark.parametrize("name", ["whole_logits", "whole_tp_logits"])
def test_every_rank_has_the_logits_of_all_tokens_in_evaluation(results: Results, name: str) -> None:
    assert_gradients(results[name])


def test_an_optimizer_of_sharded_states_knows_all_ranks_that_share_them(results: Results) -> None:
    """Those of a sequence too: Lamb's norms would be of parts, and CAME's shapes would not fit."""
    assert results["sharded_optimizer"]["ranks"] == 4


def test_a_users_model_with_a_policy_of_its_own_is_that_of_one_process(results: Results) -> None:
    assert_losses(results["own_model"])
    assert_gradients(results["own_model"])


def test_ranks_of_a_sequence_read_the_same_samples(results: Results) -> None:
    """Sequences of two ranks: together they read all samples."""
    for name, samples in results["loaders"].items():
        assert samples[0] == samples[1] and samples[2] == samples[3], name
        assert sorted(samples[0] + samples[2]) == list(range(8)), name


@pytest.mark.parametrize(
    ("error", "parts_of_message"),
    {
        "other batches": ["input_ids", "prepare_dataloader"],
        "other images": ["the ranks do not agree", "pixel_values", "prepare_dataloader"],
        "other size": ["sequence_parallel_size 4", "sp_size 2"],
        "hybrid plugin": ["the forward of model by ColossalAI's", "use WallFacerPlugin"],
        "world": ["sequence_parallel_size 3", "4 ranks"],
        "group": ["sequence_parallel_size", "4 ranks", "got 3"],
        "plugin of another size": ["the ranks do not agree", "2 (ranks [0, 1, 2]), 4 (ranks [3])"],
        "model of another size": ["the ranks do not agree", "2 (ranks [0, 1, 2]), 4 (ranks [3])"],
        "pipeline": ["OwnModel", "pp_size=1", "has a policy for"],
        "summed twice": ["tied weights", "booster.no_sync(model, optimizer)"],
        "zero bubble": ["zbv", "1f1b", "interleaved"],
        "clipped": ["max_norm=1.0", "tp_size=2", "GPT-2"],
        "cache": ["past_key_values"],
        "tuple": ["return_dict=False"],
        "mode": ["sequence_parallelism_mode", "split_gather", "ring_attn"],
    }.items(),
)
def test_an_error_of_a_user_is_named(
    results: Results, error: str, parts_of_message: list[str]
) -> None:
    for part in parts_of_message:
        assert part in results["refused"][error]
