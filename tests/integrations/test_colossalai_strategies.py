"""Training with LSS Transformer and with DSP under the real ColossalAI equals one process."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch

from tests.integrations.colossalai_jobs import (
    Results,
    assert_gradients,
    assert_losses,
    assert_losses_in_16_bits,
    assert_weights,
    needs_colossalai,
    run_cases,
)

if importlib.util.find_spec("colossalai"):
    from tests.integrations.colossalai_models import build

pytestmark = [needs_colossalai, pytest.mark.processes]

FOUR_STEPS = {"steps": 4}
LSS4 = {"sequence_parallel_size": 4, "strategy": "lss"}
LSS2 = LSS4 | {"sequence_parallel_size": 2}
STAGES: dict[str, Any] = {
    "dims": {"time": 1, "space": 2},
    "needs": {"dit.blocks.[03]": "space", "dit.blocks.2": "time"},
    "enters": "dit.blocks.0",
    "starts_along": "time",
    "leaves": "dit.final",
}
DSP4 = {"sequence_parallel_size": 4, "route": {"name": "ring"}, "dsp": STAGES}
DSP2 = LSS2 | {"dsp": STAGES}
VIDEO = {"family": "video"} | FOUR_STEPS
ZERO: dict[str, Any] = {"precision": "fp32", "overlap_communication": False}
GEMINI: dict[str, Any] = {
    "placement_policy": "static",
    "precision": "bf16",
    "enable_async_reduce": False,
}

LSS: dict[str, dict[str, Any]] = {
    "lss4": {"wallfacer": LSS4} | FOUR_STEPS,
    "lss_dp2": {"wallfacer": LSS2, "batch": "ragged"} | FOUR_STEPS,
    "lss_tp2": {"wallfacer": LSS2, "options": {"tp_size": 2}} | FOUR_STEPS,
    "lss_ddp": {"wallfacer": LSS4, "plugin": "ddp"} | FOUR_STEPS,
}
DSP: dict[str, dict[str, Any]] = {
    "dsp_ddp": {"wallfacer": DSP4, "plugin": "ddp"} | VIDEO,
    "dsp_ddp_dp2": {"wallfacer": DSP2, "plugin": "ddp"} | VIDEO,
    "dsp_zero1": {"wallfacer": DSP4, "plugin": "zero", "options": {"stage": 1} | ZERO} | VIDEO,
    "dsp_zero2": {"wallfacer": DSP2, "plugin": "zero", "options": {"stage": 2} | ZERO} | VIDEO,
}
IN_16_BITS: dict[str, dict[str, Any]] = {
    "dsp_gemini": {
        "wallfacer": DSP4,
        "plugin": "gemini",
        "optimizer": "hybrid_adam",
        "options": GEMINI,
    }
    | VIDEO
}
EXACT = LSS | DSP


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("strategies")
    cases = [{"name": name} | case for name, case in (EXACT | IN_16_BITS).items()]
    file = folder / "config.json"
    file.write_text(json.dumps({"colossalai": {"plugin": "torch_ddp"}, "wallfacer": DSP4}))
    cases.append(DSP["dsp_ddp"] | {"name": "dsp_differing", "run": "differing"})
    cases.append({"name": "dsp_file", "wallfacer": DSP4, "config": str(file)} | VIDEO)
    return run_cases(cases, 4, folder)


@pytest.mark.parametrize("name", [*EXACT, "dsp_file"])
def test_training_is_that_of_one_process(results: Results, name: str) -> None:
    assert_losses(results[name])
    assert_weights(results[name])
    if "zero" not in name:
        assert_gradients(results[name], in_parts=name == "lss_tp2")


def test_dsp_under_gemini_errs_as_one_process_in_bfloat16(results: Results) -> None:
    """Losses as near as in one process; weights move in the direction of float32's.

    0.8: biases of keys have gradients of rounding alone.
    """
    result = results["dsp_gemini"]
    assert_losses_in_16_bits(result)
    for name, start in build("video").named_parameters():
        actual = result["weights"][name] - start
        expected = result["expected"]["weights"][name] - start
        cosine = torch.cosine_similarity(actual.flatten(), expected.flatten(), 0)
        assert cosine > 0.8, f"{name}: {cosine:.3f}"


@pytest.mark.parametrize("name", LSS)
def test_lss_gathers_keys_and_reduces_their_gradients(results: Results, name: str) -> None:
    sent = results[name]["bytes"]
    assert sent["forward gather"] > 0 and sent["backward reduce"] > 0
    assert not any("step" in label for label in sent)


@pytest.mark.parametrize("name", [*DSP, *IN_16_BITS])
def test_dsp_switches_dims_and_full_attention_takes_the_route(results: Results, name: str) -> None:
    sent = results[name]["bytes"]
    assert sent["forward switch"] == sent["backward switch"] > 0
    assert ("forward step 0" in sent) == ("strategy" not in (DSP | IN_16_BITS)[name]["wallfacer"])


def test_batches_that_differ_between_ranks_are_refused(results: Results) -> None:
    assert "the ranks do not agree (values by rank)" in results["dsp_differing"]["error"]


def test_dsp_in_the_hybrid_plugin_is_refused() -> None:
    from wf_colossalai import WallFacerPlugin

    with pytest.raises(NotImplementedError, match='"dsp" is not supported.*wf_colossalai.apply'):
        WallFacerPlugin(sequence_parallel_size=2, dsp=STAGES)


def test_a_users_attention_that_does_not_call_wallfacer_is_refused() -> None:
    from tests.helpers import run_threads
    from tests.integrations.transformers_models import sequence_parallel
    from wf_colossalai import AttentionModule
    from wf_colossalai.attach import attach

    class OwnAttention(torch.nn.Embedding):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    def rank(comm: Any) -> None:
        model = OwnAttention(8, 8)
        attach(model, sequence_parallel(comm), {"OwnAttention": AttentionModule()})
        with pytest.raises(NotImplementedError, match="no layer of OwnAttention called self.wallf"):
            model(torch.ones(1, 8, dtype=torch.int64))

    run_threads(2, rank)
