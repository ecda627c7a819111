"""LSS Transformer and DSP under the real ColossalAI train as one process does."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch

from tests.integrations.colossalai_jobs import (
    Results,
    assert_as_near_as_16_bits,
    assert_gradients,
    assert_losses,
    assert_weights,
    needs_colossalai,
    run_cases,
)

if importlib.util.find_spec("colossalai"):
    from tests.integrations.colossalai_models import build

pytestmark = [needs_colossalai, pytest.mark.processes]

FEW = {"steps": 4}
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
VIDEO = {"family": "video"} | FEW
ZERO: dict[str, Any] = {"precision": "fp32", "overlap_communication": False}
GEMINI: dict[str, Any] = {
    "placement_policy": "static",
    "precision": "bf16",
    "enable_async_reduce": False,
}

LSS: dict[str, dict[str, Any]] = {
    "lss4": {"words": LSS4} | FEW,
    "lss_dp2": {"words": LSS2, "kind": "ragged"} | FEW,
    "lss_tp2": {"words": LSS2, "options": {"tp_size": 2}} | FEW,
    "lss_ddp": {"words": LSS4, "plugin": "ddp"} | FEW,
}
DSP: dict[str, dict[str, Any]] = {
    "dsp_ddp": {"words": DSP4, "plugin": "ddp"} | VIDEO,
    "dsp_ddp_dp2": {"words": DSP2, "plugin": "ddp"} | VIDEO,
    "dsp_zero1": {"words": DSP4, "plugin": "zero", "options": {"stage": 1} | ZERO} | VIDEO,
    "dsp_zero2": {"words": DSP2, "plugin": "zero", "options": {"stage": 2} | ZERO} | VIDEO,
}
HALF: dict[str, dict[str, Any]] = {
    "dsp_gemini": {
        "words": DSP4,
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
    cases = [{"name": name} | case for name, case in (EXACT | HALF).items()]
    file = folder / "config.json"
    file.write_text(json.dumps({"colossalai": {"plugin": "torch_ddp"}, "wallfacer": DSP4}))
    cases.append(DSP["dsp_ddp"] | {"name": "dsp_differing", "run": "differing"})
    cases.append({"name": "dsp_file", "words": DSP4, "config": str(file)} | VIDEO)
    return run_cases(cases, 4, folder)


@pytest.mark.parametrize("name", [*EXACT, "dsp_file"])
def test_training_is_that_of_one_process(results: Results, name: str) -> None:
    assert_losses(results[name])
    assert_weights(results[name])
    if "zero" not in name:
        assert_gradients(results[name])


def test_dsp_under_gemini_stays_within_the_error_of_bfloat16(results: Results) -> None:
    found = results["dsp_gemini"]
    assert_as_near_as_16_bits(found)
    for name, start in build("video").named_parameters():
        right, ours = (w[name] - start for w in (found["expected"]["weights"], found["weights"]))
        along = torch.cosine_similarity(ours.flatten(), right.flatten(), 0)
        assert along > 0.8, f"{name}: learnt along {along:.3f}"  # biases of keys only wander


@pytest.mark.parametrize("name", LSS)
def test_lss_gathers_forward_and_reduces_backward(results: Results, name: str) -> None:
    sent = results[name]["bytes"]
    assert sent["forward gather"] > 0 and sent["backward home"] > 0
    assert not any("hop" in label or "all_gather" in label for label in sent)


@pytest.mark.parametrize("name", [*DSP, *HALF])
def test_dsp_switches_and_full_attention_meets(results: Results, name: str) -> None:
    sent = results[name]["bytes"]
    assert sent["forward switch"] == sent["backward switch"] > 0
    assert ("forward step 0" in sent) == ("strategy" not in (DSP | HALF)[name]["words"])


def test_ranks_with_batches_of_their_own_are_told(results: Results) -> None:
    assert "the ranks do not agree (values by rank)" in results["dsp_differing"]["error"]


def test_dsp_in_the_hybrid_plugin_is_refused() -> None:
    from wf_colossalai import WallFacerPlugin

    with pytest.raises(NotImplementedError, match='"dsp" is not supported.*wf_colossalai.apply'):
        WallFacerPlugin(sequence_parallel_size=2, dsp=STAGES)


def test_attention_of_ones_own_that_does_not_call_us_is_refused() -> None:
    from tests.helpers import run_threads
    from tests.integrations.transformers_models import sequence_parallel
    from wf_colossalai import AttentionModule
    from wf_colossalai.attach import attach

    own = type(
        "OwnAttention", (torch.nn.Embedding,), {"forward": lambda self, input_ids: input_ids}
    )

    def rank(comm: Any) -> None:
        model = own(8, 8)
        attach(model, sequence_parallel(comm), {"OwnAttention": AttentionModule()})
        with pytest.raises(NotImplementedError, match="no layer of OwnAttention called self.wallf"):
            model(torch.ones(1, 8, dtype=torch.int64))

    run_threads(2, rank)
