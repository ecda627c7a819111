"""Tiled MLPs and loss under DeepSpeed at ZeRO 0 to 3, on two ranks.

Gradients and the number of collectives equal those of the same model without tiles. What a rank
does, and what its results are: autochunk_worker.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from tests.integrations.autochunk_worker import STAGE_AND_RECOMPUTE  # noqa: E402
from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402

pytestmark = [pytest.mark.processes, pytest.mark.deepspeed]

TOLERANCES = {"rtol": 1e-5, "atol": 1e-6}  # of float32, in which DeepSpeed keeps gradients


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tiles")
    run_ranks([str(Path(__file__).with_name("autochunk_worker.py")), str(folder)], 2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize(("stage", "recompute"), STAGE_AND_RECOMPUTE)
def test_gradients_and_collectives_equal_those_without_tiles(
    stage: int, recompute: bool, ranks: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        grads, counts = rank["zero"][stage, recompute, True]
        expected_grads, expected_counts = rank["zero"][stage, recompute, False]
        torch.testing.assert_close(grads, expected_grads, **TOLERANCES)
        assert counts == expected_counts and counts["gradients"] > 0


def test_tiled_module_whose_parts_zero_3_gathers_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["error"].startswith("ZeRO 3 would gather 'gate_proj' of a tiled LlamaMLP")


@pytest.mark.parametrize("sequence_parallel_size", [1, 2])
def test_autochunk_block_tiles_the_mlps_with_the_models_gradients(
    sequence_parallel_size: int, ranks: list[dict[str, Any]]
) -> None:
    """At ZeRO 3, which gathers no more often than without tiles. A single rank takes the loss of
    the model, two take `engine.wallfacer.loss`."""
    for rank in ranks:
        grads, counts = rank["entry"][sequence_parallel_size, True]
        expected_grads, expected_counts = rank["entry"][sequence_parallel_size, False]
        torch.testing.assert_close(grads, expected_grads, **TOLERANCES)
        assert counts["tiles"] == 2 and expected_counts["tiles"] == 0
        assert 0 < counts["_allgather_base_.default"] <= expected_counts["_allgather_base_.default"]
