"""Training with the real ColossalAI and WallFacer on 4 ranks equals training in one process.

The one process has the whole sequences and no ColossalAI. A case takes 10 steps unless it says
less; what is compared is computed in colossalai_worker.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT
from tests.integrations.colossalai_jobs import (
    Results,
    assert_gradients,
    assert_losses,
    assert_losses_in_16_bits,
    assert_weights,
    needs_colossalai,
    run_cases,
)
from tests.long import selected_cases

pytestmark = [needs_colossalai, pytest.mark.processes]

SP2, SP4 = {"sequence_parallel_size": 2}, {"sequence_parallel_size": 4}
RING2, RING4 = SP2 | {"route": "ring"}, SP4 | {"route": "ring"}
OFFLOAD = {"activation_checkpointing": {"offload": True}}
TWO_STAGES = {"batch": "microbatches", "options": {"pp_size": 2, "num_microbatches": 2}}
# With overlap_p2p ColossalAI's schedule hangs on gloo, with or without WallFacer.
INTERLEAVED = {"pp_style": "interleaved", "num_model_chunks": 2, "overlap_p2p": False}
BF16: dict[str, Any] = {"precision": "bf16"}
NO_OVERLAP: dict[str, Any] = {"overlap_communication": False}  # a CPU has no streams
TILED_MODULES = {"autochunk": {"max_slowdown": 1.0, "seqlen": 512}}
FEW_STEPS, MORE_STEPS = {"steps": 3}, {"steps": 6}

# A Llama under WallFacerPlugin, in float32. dp, tp, pp, sp: degrees of parallelism.
HYBRID: dict[str, dict[str, Any]] = {
    "sp4": {"wallfacer": SP4} | MORE_STEPS,
    "dp2_sp2": {"wallfacer": RING2} | MORE_STEPS,
    "tp2_sp2": {"wallfacer": RING2, "options": {"tp_size": 2}} | MORE_STEPS,
    "tp2_sp2_auto": {"wallfacer": SP2, "options": {"tp_size": 2}} | FEW_STEPS,
    "tp2_counted": {"wallfacer": RING2, "options": {"tp_size": 2}, "batch": "counted"} | FEW_STEPS,
    "pp2_sp2": {"wallfacer": RING2} | TWO_STAGES | MORE_STEPS,
    "checkpointed": {"wallfacer": RING4, "checkpointing": "before"} | FEW_STEPS,
    "checkpointed_ragged": {"wallfacer": RING4, "checkpointing": "after", "batch": "ragged"}
    | FEW_STEPS,
    "offloaded": {"wallfacer": RING4 | OFFLOAD, "batch": "ragged"} | FEW_STEPS,
    "offloaded_pp2": {"wallfacer": RING2 | OFFLOAD} | TWO_STAGES | FEW_STEPS,
    "tiled": {"wallfacer": RING4 | TILED_MODULES, "batch": "ragged"} | FEW_STEPS,
    "padded": {"wallfacer": RING4, "batch": "padded"} | FEW_STEPS,
    "unequal": {"wallfacer": RING4, "batch": "unequal"} | FEW_STEPS,
    "unmasked": {"wallfacer": RING4, "batch": "unmasked"} | FEW_STEPS,
    "ragged": {"wallfacer": RING4, "batch": "ragged"} | FEW_STEPS,
    "packed": {"wallfacer": RING4, "batch": "packed"} | FEW_STEPS,
    "packed_auto": {"wallfacer": SP4 | {"layout": "document_zigzag"}, "batch": "packed"}
    | FEW_STEPS,
    "packed_tp2_auto": {"wallfacer": SP2, "options": {"tp_size": 2}, "batch": "packed"} | FEW_STEPS,
    "lazy": {"wallfacer": RING4, "lazy": True} | FEW_STEPS,
    "concentric": {"wallfacer": SP4 | {"route": {"name": "concentric", "team_size": 2}}}
    | FEW_STEPS,
    "mesh": {"wallfacer": SP4 | {"route": {"name": "mesh", "rows": 2, "cols": 2}}} | FEW_STEPS,
    "ulysses": {"wallfacer": RING4 | {"ulysses_degree": 2, "layout": "contiguous"}} | FEW_STEPS,
    "adamw": {"wallfacer": RING4, "optimizer": "adamw"} | FEW_STEPS,
    "checkpointed_gpt2": {"wallfacer": RING4, "checkpointing": "before", "family": "gpt2"}
    | {"batch": "ragged"}
    | FEW_STEPS,
}
# Other families; alone, and with tensor parallelism or two stages.
FAMILIES = (
    "qwen2",
    "qwen3",
    "cohere",
    "mistral",
    "gpt2",
    "gpt2_full",
    "gptj",
    "opt",
    "bert",
    "vit",
)
MODELS: dict[str, dict[str, Any]] = (
    {name: {"wallfacer": RING4, "family": name, "batch": "ragged"} | FEW_STEPS for name in FAMILIES}
    | {
        f"tp_{name}": {"wallfacer": RING2, "family": name, "options": {"tp_size": 2}} | FEW_STEPS
        for name in ("qwen2", "cohere", "mistral", "gptj", "opt", "bert", "vit")
    }
    | {
        f"pp_{name}": {"wallfacer": RING2, "family": name} | TWO_STAGES | FEW_STEPS
        for name in ("qwen2", "mistral", "gpt2", "gptj", "opt", "bert", "vit")
    }
    | {
        "gpt2_chunks": {
            "wallfacer": RING4 | {"ulysses_degree": 2, "ulysses_chunks": 2},
            "family": "gpt2",
            "batch": "ragged",
        }
        | FEW_STEPS,
        "pp_interleaved": {
            "wallfacer": RING2,
            "family": "gpt2_deep",
            "checkpointing": "before",
            "batch": "microbatches",
            "options": TWO_STAGES["options"] | INTERLEAVED,
        }
        | FEW_STEPS,
        "pp_interleaved_gptj": {
            "wallfacer": RING2,
            "family": "gptj_deep",
            "batch": "microbatches",
            "options": TWO_STAGES["options"] | INTERLEAVED,
        }
        | FEW_STEPS,
        "checkpointed_vit": {"wallfacer": RING4, "family": "vit", "checkpointing": "after"}
        | FEW_STEPS,
        # ColossalAI gathers GPT-2's fused weights with .cuda(): they cannot be saved here
        "tp_gpt2": {
            "wallfacer": RING2,
            "family": "gpt2",
            "options": {"tp_size": 2},
            "no_weights": True,
        }
        | FEW_STEPS,
    }
)
# Heads that read tokens of the whole sequence: classes, spans, two choices.
CLASSES = ("llama_classes", "gpt2_classes", "opt_classes", "bert_classes")
WHOLE_SEQUENCE_HEADS: dict[str, dict[str, Any]] = (
    {
        name: {"wallfacer": RING4, "family": name, "batch": "ragged"} | FEW_STEPS
        for name in (*CLASSES, "gpt2_spans", "gpt2_double")
    }
    | {
        f"pp_{name}": {"wallfacer": RING2, "family": name} | TWO_STAGES | FEW_STEPS
        for name in ("gpt2_double", "bert_classes")
    }
    | {
        f"tp_{name}": {"wallfacer": RING2, "family": name, "options": {"tp_size": 2}} | FEW_STEPS
        for name in ("llama_classes", "bert_classes")
    }
    | {
        "unequal_classes": {
            "wallfacer": RING4,
            "family": "gpt2_classes",
            "batch": "unequal",
            "checkpointing": "before",
        }
        | FEW_STEPS,
        "ddp_double": {"wallfacer": RING4, "plugin": "ddp", "family": "gpt2_double"} | FEW_STEPS,
    }
)
# ColossalAI's other plugins, in float32.
OTHER_PLUGINS: dict[str, dict[str, Any]] = {
    "ddp": {"wallfacer": RING4, "plugin": "ddp"} | MORE_STEPS,
    "ddp_vit": {"wallfacer": RING4, "plugin": "ddp", "family": "vit"} | FEW_STEPS,
    "zero1": {
        "wallfacer": RING4,
        "plugin": "zero",
        "options": {"stage": 1, "precision": "fp32"} | NO_OVERLAP,
    }
    | MORE_STEPS,
    "zero2_offload": {
        "wallfacer": RING2 | OFFLOAD,
        "plugin": "zero",
        "optimizer": "hybrid_adam",
        "options": {"stage": 2, "precision": "fp32", "cpu_offload": True} | NO_OVERLAP,
    }
    | MORE_STEPS,
}
FP16: dict[str, Any] = {"precision": "fp16", "initial_scale": 256}  # at which nothing overflows
IN_16_BITS: dict[str, dict[str, Any]] = {
    "hybrid_zero1_fp16": {"wallfacer": RING4, "options": {"zero_stage": 1} | FP16 | NO_OVERLAP},
    "hybrid_fp16_pp2": {
        "wallfacer": RING2,
        "batch": "microbatches",
        "options": TWO_STAGES["options"] | FP16,
    },
    "zero2_fp16": {
        "wallfacer": RING4,
        "plugin": "zero",
        "options": {"stage": 2} | FP16 | NO_OVERLAP,
    },
    "gemini_fp16": {
        "wallfacer": RING4,
        "plugin": "gemini",
        "optimizer": "hybrid_adam",
        "options": {"placement_policy": "static", "enable_async_reduce": False} | FP16,
    },
    "hybrid_zero1": {"wallfacer": RING4, "options": {"zero_stage": 1} | BF16 | NO_OVERLAP},
    "hybrid_zero2_offload": {
        "wallfacer": SP4,
        "optimizer": "hybrid_adam",
        "options": {"zero_stage": 2, "cpu_offload": True} | BF16 | NO_OVERLAP,
    },
    "gemini_offload": {
        "wallfacer": RING4 | OFFLOAD,
        "plugin": "gemini",
        "optimizer": "hybrid_adam",
        "options": {
            "placement_policy": "static",
            "offload_optim_frac": 1.0,
            "offload_param_frac": 1.0,
            "enable_async_reduce": False,
        }
        | BF16,
    },
}
OF_MODELS = MODELS | WHOLE_SEQUENCE_HEADS
EXACT = HYBRID | OF_MODELS | OTHER_PLUGINS
# Cases that keep the default "verify": the comparison before the first step takes as long as 20
# steps, so that each model and each engine has it once.
VERIFIED = (*FAMILIES, *CLASSES, "sp4", "tp_bert", "pp_gpt2", "ddp_vit", "zero1", "hybrid_zero1")
PUBLISHED: dict[str, dict[str, Any]] = {
    path.stem: {
        "config": str(path),
        "wallfacer": json.loads(path.read_text())["wallfacer"],
        "options": json.loads(path.read_text())["colossalai"],
        "optimizer": "hybrid_adam",
    }
    | FEW_STEPS
    for path in sorted((ROOT / "configs" / "colossalai").glob("*.json"))
}
RESUMED: dict[str, dict[str, Any]] = {
    "resumed_4_to_2": {
        "run": "resumed",
        "wallfacer": RING4,
        "resume_with": RING2,
        "optimizer": "adamw",
    }
    | MORE_STEPS,
    "resumed_zero1": {
        "run": "resumed",
        "wallfacer": RING4,
        "resume_with": RING2,
        "optimizer": "adamw",
        "options": {"zero_stage": 1} | BF16 | NO_OVERLAP,
    },
}


def run_selected(
    cases: dict[str, dict[str, Any]], folder: Path, request: pytest.FixtureRequest
) -> Results:
    """The results of one job of 4 ranks that runs the cases of the selected tests."""
    selected = []
    for name in selected_cases(request, cases):
        case = {"name": name, "steps": 10} | cases[name]
        if name not in VERIFIED and name not in PUBLISHED:
            case["wallfacer"] = case["wallfacer"] | {"verify": False}
        selected.append(case)
    return run_cases(selected, 4, folder)


@pytest.fixture(scope="module")
def of_models(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    return run_selected(OF_MODELS, tmp_path_factory.mktemp("models"), request)


@pytest.fixture(scope="module")
def of_engines(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    cases = HYBRID | OTHER_PLUGINS | IN_16_BITS | RESUMED | PUBLISHED
    return run_selected(cases, tmp_path_factory.mktemp("engines"), request)


@pytest.fixture
def results(name: str, request: pytest.FixtureRequest) -> Results:
    """Those of the job with the case: two jobs, since all cases take minutes on a busy machine."""
    return request.getfixturevalue("of_models" if name in OF_MODELS else "of_engines")


@pytest.mark.parametrize("name", EXACT)
def test_losses_and_weights_are_those_of_one_process(results: Results, name: str) -> None:
    assert_losses(results[name])
    if not EXACT[name].get("no_weights"):
        assert_weights(results[name])


# ZeRO's plugin divides every gradient between the ranks.
WHOLE_GRADIENTS = [name for name, case in EXACT.items() if case.get("plugin") != "zero"]


@pytest.mark.parametrize("name", WHOLE_GRADIENTS)
def test_first_gradients_are_those_of_one_process(results: Results, name: str) -> None:
    options = EXACT[name].get("options", {})
    assert_gradients(results[name], in_parts=bool(options.keys() & {"tp_size", "pp_size"}))


@pytest.mark.parametrize("name", [*EXACT, *IN_16_BITS])
def test_checkpoints_are_offloaded_only_with_the_option(results: Results, name: str) -> None:
    config = (EXACT | IN_16_BITS)[name]["wallfacer"]
    assert results[name]["offloads"] == ("activation_checkpointing" in config)


@pytest.mark.parametrize("name", HYBRID)
def test_modules_are_tiled_only_with_the_option(results: Results, name: str) -> None:
    assert bool(results[name]["tiled"]) == ("autochunk" in HYBRID[name]["wallfacer"])


@pytest.mark.parametrize("name", [*IN_16_BITS, "resumed_zero1"])
def test_losses_in_16_bits_err_as_those_of_one_process_in_16_bits(
    results: Results, name: str
) -> None:
    assert_losses_in_16_bits(results[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_losses_under_published_settings_are_those_of_one_process(
    results: Results, name: str
) -> None:
    """2e-2 in bfloat16: a few roundings of 2**-8."""
    in_bf16 = PUBLISHED[name]["options"].get("precision") == "bf16"
    assert_losses(results[name], 2e-2 if in_bf16 else 1e-5)


@pytest.mark.parametrize("name", ["resumed_4_to_2"])
def test_training_resumed_at_another_size_is_that_of_one_process(
    results: Results, name: str
) -> None:
    assert_losses(results[name])
    assert_weights(results[name])
