"""Tiled MLPs and loss at ZeRO 0 to 3: gradients and collectives are the untiled model's."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402

pytestmark = [pytest.mark.processes, pytest.mark.deepspeed]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("tiles")
    run_ranks([str(Path(__file__).with_name("autochunk_worker.py")), str(folder)], 2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize(("stage", "recompute"), list(product(range(4), (False, True))))
def test_gradients_and_collectives(stage: int, recompute: bool, found: list[Any]) -> None:
    for rank in found:
        whole, counts = rank[stage, recompute, False]
        ours, our_counts = rank[stage, recompute, True]
        for one, other in zip(ours, whole, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-5, atol=1e-6
            )  # of what it keeps in 32 bits
        assert our_counts == counts and counts["gradients"] > 0


def test_zero_3_must_gather_a_tiled_module_as_a_whole(found: list[Any]) -> None:
    for rank in found:
        assert rank["error"].startswith("ZeRO 3 would gather 'gate_proj' of a tiled LlamaMLP")


@pytest.mark.parametrize("size", [1, 2])
def test_the_block_of_the_json(size: int, found: list[Any]) -> None:
    """ZeRO 3; with sequence parallelism the model makes no loss, and MLPs alone are tiled."""
    for rank in found:
        whole, counts = rank[f"door {size} False"]
        ours, our_counts = rank[f"door {size} True"]
        for one, other in zip(ours, whole, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert counts["tiles"] == 0 and our_counts["tiles"] == 2
        gathered = [counts["_allgather_base_.default"], our_counts["_allgather_base_.default"]]
        assert gathered[1] <= gathered[0]
