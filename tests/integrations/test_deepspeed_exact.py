"""Real DeepSpeed training with WallFacer on 2 and 4 ranks gives the losses, gradient norms and
weights of plain DeepSpeed with dense attention on one rank, in float32, at every ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from tests.integrations.deepspeed_cases import (  # noqa: E402
    COMPILED_CASE,
    RING,
    STAGES,
    STEPS_AFTER_RESUMING,
    STEPS_BEFORE_SAVING,
    assert_same_training,
    case,
    feature_cases,
    reference_cases,
    route_cases,
)
from tests.integrations.deepspeed_jobs import run_cases, run_ranks  # noqa: E402
from tests.long import selected_cases  # noqa: E402

pytestmark = [pytest.mark.deepspeed, pytest.mark.processes]

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Plain DeepSpeed with dense attention on one rank."""
    return run_cases(reference_cases(), 1, tmp_path_factory.mktemp("one_rank"))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_cases([*route_cases(2), COMPILED_CASE], 2, tmp_path_factory.mktemp("two_ranks"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("four_ranks")


@pytest.fixture(scope="module")
def four_ranks(request: pytest.FixtureRequest, folder: Path) -> Results:
    cases = {case["name"]: case for case in route_cases(4)}
    return run_cases([cases[name] for name in selected_cases(request, cases)], 4, folder / "matrix")


@pytest.fixture(scope="module")
def features(request: pytest.FixtureRequest, folder: Path) -> Results:
    cases = {case["name"]: case for case in feature_cases(folder)}
    names = ["saved_4", *selected_cases(request, cases)]  # others resume from what it saves
    return run_cases([case for name, case in cases.items() if name in names], 4, folder)


def names(cases: list[dict[str, Any]]) -> list[str]:
    return [case["name"] for case in cases]


@pytest.mark.parametrize("name", names(route_cases(2)))
def test_two_ranks_train_as_one(name: str, two_ranks: Results, reference: Results) -> None:
    assert_same_training(two_ranks[name], reference[name.split("_")[0]])
    assert two_ranks[name]["sent"] > 0


@pytest.mark.parametrize("name", names(route_cases(4)))
def test_four_ranks_train_as_one(name: str, four_ranks: Results, reference: Results) -> None:
    assert_same_training(four_ranks[name], reference[name.split("_")[0]])
    assert four_ranks[name]["sent"] > 0


@pytest.mark.parametrize("name", [f"dp2_{stage}" for stage in STAGES])
def test_data_parallel_groups_and_accumulation(
    name: str, features: Results, reference: Results
) -> None:
    """Two groups of two ranks take two sequences each per step; one rank takes all four."""
    assert_same_training(features[name], reference["sgd_4"])


@pytest.mark.parametrize("name", ["token_1", "token_3"])
def test_token_average_weighs_every_valid_token_of_a_step_alike(
    name: str, features: Results, reference: Results
) -> None:
    assert_same_training(features[name], reference["token_4"])


def test_the_data_tell_the_two_averages_apart(reference: Results) -> None:
    """Otherwise the test above would also pass with the average over sequences."""
    by_token, by_sequence = (reference[name]["norms"][0] for name in ("token_4", "sgd_4"))
    assert abs(by_token / by_sequence - 1) > 1e-3


@pytest.mark.parametrize("name", ["offload_2", "offload_3"])
def test_offload_to_cpu(name: str, features: Results, reference: Results) -> None:
    assert_same_training(features[name], reference["few"])


@pytest.mark.parametrize("name", ["recompute_0", "recompute_3", "deepspeed_recompute_1"])
def test_activation_checkpointing(name: str, features: Results, reference: Results) -> None:
    assert_same_training(features[name], reference["few"])


@pytest.mark.parametrize("name", ["offloaded_recompute_0", "offloaded_recompute_3"])
def test_activation_checkpoints_on_the_host(
    name: str, features: Results, reference: Results
) -> None:
    assert features[name]["offloads"]
    assert_same_training(features[name], reference["few"])


@pytest.mark.parametrize("name", ["pretrained_2", "pretrained_3", "offloaded_init_3"])
def test_from_pretrained_under_a_deepspeed_configuration(
    name: str, features: Results, reference: Results
) -> None:
    """At ZeRO 3 the parameters are partitioned while they are loaded: no rank holds all of them."""
    assert features[name]["partitioned"] == name.endswith("_3")
    assert_same_training(features[name], reference["few"])


@pytest.mark.parametrize("name", ["chunks_1", "chunks_3"])
def test_ulysses_exchange_in_chunks(name: str, features: Results, reference: Results) -> None:
    assert_same_training(features[name], reference["four_key_heads"])
    assert features[name]["sent"] > 0


def test_a_compiled_engine(two_ranks: Results, reference: Results) -> None:
    """Attention runs as Python, between the compiled graphs."""
    assert two_ranks["compiled_3"]["compiled"]
    assert_same_training(two_ranks["compiled_3"], reference["two_steps"])


@pytest.mark.parametrize("name", ["bf16_2", "bf16_3"])
def test_bf16_follows_the_float32_curve(name: str, features: Results, reference: Results) -> None:
    """To 2%: a bf16 number has 8 significant bits."""
    losses, expected = (torch.tensor(r["losses"]) for r in (features[name], reference["few"]))
    torch.testing.assert_close(losses, expected, rtol=2e-2, atol=0)


@pytest.mark.parametrize("name", ["resumed_2", "resumed_1"])
def test_resume_at_another_sequence_parallel_size(
    name: str, features: Results, reference: Results
) -> None:
    assert features[name]["first_step"] == STEPS_BEFORE_SAVING
    assert_same_training(features[name], reference["adam_4"])


@pytest.mark.usefixtures("features")  # they save the checkpoint
def test_resume_at_another_world_size(folder: Path, reference: Results, tmp_path: Path) -> None:
    saved = folder / "saved"
    paths = ["--input_folder", str(saved / "saved"), "--output_folder", str(saved / "universal")]
    run_ranks(["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", *paths], 1)
    resumed = case(
        "resumed",
        {"sequence_parallel_size": 2, **RING},
        stage=1,
        accumulation=4,
        config={"checkpoint": {"load_universal": True}},
        steps=STEPS_AFTER_RESUMING,
        sequences=4,
        load=str(saved),
        tag="universal",
    )
    actual = run_cases([resumed], 2, tmp_path)["resumed"]
    assert actual["first_step"] == STEPS_BEFORE_SAVING
    assert_same_training(actual, reference["adam_4"])


def test_the_reference_learns(reference: Results) -> None:
    """A model whose loss stays where it is would hide wrong gradients."""
    losses = reference["learns"]["losses"]
    assert losses[-1] < 0.95 * losses[0]
