"""transformers' Trainer and loops of accelerate train with WallFacer as without it, in real jobs.

Four gloo ranks with WallFacer, beside the same job without it under DDP, of one rank for each
sequence that the four ranks compute at a time. The Trainers compute in float32.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import transformers  # noqa: E402

from tests.integrations.accelerate_jobs import Results, run_with_and_without  # noqa: E402
from tests.integrations.deepspeed_jobs import ROOT, run_ranks  # noqa: E402
from tests.integrations.deepspeed_trainer import NUM_EVALUATED, assert_logits_close  # noqa: E402
from tests.long import selected_cases  # noqa: E402

pytestmark = pytest.mark.processes

SHUFFLED = """
import torch, torch.distributed as dist, wf_accelerate
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
with wf_accelerate.counted_by_group(accelerator, lambda: 2):
    loader = torch.utils.data.DataLoader(range(9), shuffle=True)
    prepared = accelerator.prepare(loader)
torch.manual_seed(0)
expected = torch.cat(list(loader))
torch.manual_seed(dist.get_rank())  # as set_seed(..., device_specific=True) does
assert torch.cat(list(prepared)).equal(expected)
"""
LOADED = """
import os, random, sys
import numpy, torch, torch.distributed as dist, wf_accelerate
from accelerate import Accelerator
accelerator, folder = Accelerator(cpu=True), sys.argv[1]
def draws():
    return float(torch.rand(1)), random.random(), float(numpy.random.rand())
for seed in (torch.manual_seed, random.seed, numpy.random.seed):
    seed(dist.get_rank())
accelerator.save_state(folder)
accelerator.wait_for_everyone()  # each rank writes a file
if dist.get_rank() == 0:
    os.remove(f"{folder}/random_states_1.pkl")  # as if a job of one rank had saved
expected = draws()
accelerator.wait_for_everyone()
with wf_accelerate.counted_by_group(accelerator, lambda: 2):
    accelerator.load_state(folder)
loaded = [None, None]
dist.all_gather_object(loaded, draws())
assert loaded[0] == loaded[1]
assert dist.get_rank() or loaded[0] == expected
"""
CONCENTRIC = {"sequence_parallel_size": 4, "route": {"name": "concentric", "team_size": 2}}
RING = {"sequence_parallel_size": 2, "route": {"name": "ring"}, "verify": False}
OFFLOAD = {"activation_checkpointing": {"offload": True}}


def case(
    scenario: str, wallfacer: dict[str, Any] = RING, gradient_accumulation: int = 1
) -> dict[str, Any]:
    """A case of accelerate_worker.py; its reference runs under DDP, not compiled, not resumed."""
    reference = {"fsdp": "ddp"} | dict.fromkeys(("trainer_fsdp", "resumed", "compiled"), "trainer")
    return {
        "scenario": scenario,
        "wallfacer": wallfacer,
        "gradient_accumulation": gradient_accumulation,
        "reference": {"scenario": reference.get(scenario, scenario)},
    }


CASES = {
    "trainer": case("trainer", CONCENTRIC, 4),
    "trainer_groups": case("trainer", gradient_accumulation=2),
    "trainer_fsdp": case("trainer_fsdp", RING | {"verify": True}),
    "recomputed": case("recomputed"),
    "offloaded": case("recomputed", RING | OFFLOAD),
    "own_loss": case("own_loss"),
    "smoothed": case("smoothed", CONCENTRIC | {"verify": False}),
    "penalised": case("penalised", gradient_accumulation=2),
    "stream": case("stream"),
    "seq2seq": case("seq2seq", CONCENTRIC | {"verify": False}),
    "ddp": case("ddp"),
    "ddp_auto": case("ddp", {"sequence_parallel_size": 4}),
    "fsdp": case("fsdp"),
}
LOADS_ON_CPUS = "self.args.device if self.args.world_size > 1" not in inspect.getsource(
    transformers.Trainer._load_optimizer_and_scheduler
)
if LOADS_ON_CPUS:
    CASES["resumed"] = case("resumed", gradient_accumulation=2)
# the last: the Trainer sets environment variables that compile all models that follow in the job
CASES["compiled"] = case("compiled")
LOOPS = [name for name in CASES if CASES[name]["scenario"] in ("ddp", "fsdp")]
TRAINERS = [name for name in CASES if name not in (*LOOPS, "resumed")]


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Results, Results]:
    """(with WallFacer, without it)."""
    cases = {name: CASES[name] for name in selected_cases(request, CASES)}
    return run_with_and_without(
        "accelerate_worker.py", cases, tmp_path_factory.mktemp("accelerate")
    )


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_trains_as_without_wallfacer(name: str, results: tuple[Results, Results]) -> None:
    actual, expected = (result[name] for result in results)
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert_same_curve(actual, expected)
    assert actual["total_flos"] == pytest.approx(expected["total_flos"])
    assert expected["total_flos"] > 0


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_evaluates_and_predicts_as_without_wallfacer(
    name: str, results: tuple[Results, Results]
) -> None:
    """Every sample counts once, although the last batch of two groups lacks one, also of a stream
    without a length."""
    actual, expected = (result[name] for result in results)
    metrics = () if name == "stream" else ("eval_samples", "eval_accuracy")
    for key in metrics:
        assert actual["eval"][key] == pytest.approx(expected["eval"][key], rel=1e-5)
    assert actual["labels"] == expected["labels"]
    logits, expected_logits = (torch.tensor(result["logits"]) for result in (actual, expected))
    assert logits.shape == expected_logits.shape and len(logits) == NUM_EVALUATED
    assert_logits_close(logits, expected_logits)


@pytest.mark.parametrize("name", TRAINERS)
def test_layer_inputs_are_on_the_host_only_with_offload(
    name: str, results: tuple[Results, Results]
) -> None:
    assert results[0][name]["offloads"] == (name == "offloaded")


@pytest.mark.skipif(
    not LOADS_ON_CPUS, reason="this Trainer loads an optimizer to cpu:0, which torch has not"
)
@pytest.mark.parametrize("name", ["resumed"])
def test_a_trainer_resumes_from_a_checkpoint(name: str, results: tuple[Results, Results]) -> None:
    actual, expected = (result[name] for result in results)
    assert_same_curve(actual, expected)


def assert_same_curve(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare the loss and gradient norm of each step, and the loss of the evaluation."""
    for step, expected_step in zip(actual["steps"], expected["steps"], strict=True):
        (loss, norm), (expected_loss, expected_norm) = step, expected_step
        assert loss == pytest.approx(expected_loss, abs=1e-4)  # logged as rounded
        assert norm == pytest.approx(expected_norm, rel=1e-5)
    assert actual["eval"]["eval_loss"] == pytest.approx(expected["eval"]["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "gathers_logits"),
    [
        ("trainer", [False, True, True]),  # for the metrics of evaluation and prediction
        ("smoothed", [True, True, True]),  # for the loss, which the Trainer computes
        ("stream", [False, False, True]),  # it has no metrics
    ],
)
def test_logits_are_gathered_only_if_a_loss_metrics_or_predictions_need_them(
    name: str, gathers_logits: list[bool], results: tuple[Results, Results]
) -> None:
    """In training, evaluation and prediction."""
    phases = results[0][name]["bytes_sent"]
    assert [any("unshard" in label for label in phase) for phase in phases] == gathers_logits


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_as_without_wallfacer(name: str, results: tuple[Results, Results]) -> None:
    """In float64; the norms inside Llama round to float32, and the steps add up to 1e-6."""
    actual, expected = (result[name] for result in results)
    for step, expected_step in zip(actual["steps"], expected["steps"], strict=True):
        assert step == pytest.approx(expected_step, rel=1e-6)
    assert actual["num_labels"] == expected["num_labels"]


@pytest.mark.parametrize("name", ["ddp"])
def test_a_step_before_gradients_are_averaged_is_refused(
    name: str, results: tuple[Results, Results]
) -> None:
    """A rank's own gradients are of its tokens only."""
    actual, expected = (result[name]["refused"] for result in results)
    messages = "Leave LocalSGD out", "LOMO and AdaLOMO change", "inside the backward, under DDP"
    assert not expected
    assert all(part in error for part, error in zip(messages, actual, strict=True))


def test_the_example_trains_alike_on_one_and_on_four_ranks(tmp_path: Path) -> None:
    script = [str(ROOT / "examples" / "trainer.py"), "--steps", "2", "--seq-len", "256"]
    losses = []
    for ranks in (1, 4):
        options = ["--out", str(tmp_path), "--sequence-parallel-size", str(ranks)]
        printed = run_ranks([*script, *options], ranks)
        (line,) = (line for line in printed[0].splitlines() if line.startswith("held-out loss"))
        losses.append(float(line.split()[2]))
        assert not any("held-out loss" in text for text in printed[1:])
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)  # it prints four decimals


def test_ranks_of_a_sequence_shuffle_as_the_first_one() -> None:
    run_ranks(["-c", SHUFFLED], 2)


def test_ranks_of_a_sequence_draw_alike_after_load_state(tmp_path: Path) -> None:
    """Also if fewer ranks saved: the others have no random numbers in the folder."""
    run_ranks(["-c", LOADED, str(tmp_path)], 2)
