"""The first step of real Trainers that would silently train to another result on two ranks.

Each configuration runs twice. Without the safeguard that it needs, `verify` must name what differs
from one rank; with it, the configuration must train, or be refused by the safeguard. Models whose
ranks are threads: test_first_step.py. DSP: tests/dsp/test_first_forward.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)
pytest.importorskip("accelerate", reason="accelerate is not installed", exc_type=ImportError)

from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402
from tests.integrations.first_step_worker import Step  # noqa: E402
from tests.integrations.verify_models import DIFFERS  # noqa: E402

pytestmark = pytest.mark.processes

WORKER = str(Path(__file__).with_name("first_step_worker.py"))
ATTENTION = "the output of model.layers.0.self_attn.o_proj is the first"
EMBEDDING = "the output of model.embed_tokens is the first"
LOSS = "its loss is the first"
TRAINS = "^trained"

# (configuration, what verify names, the outcome with the safeguard)
DDP = [
    ("mask", ATTENTION, TRAINS),
    ("neftune", EMBEDDING, TRAINS),
    ("entropy", LOSS, TRAINS),
    ("token_weights", LOSS, TRAINS),
    ("z_loss", LOSS, TRAINS),
    ("own_loss", LOSS, TRAINS),
    ("inner_call", ATTENTION, "LlamaModel was called, and not the model around it"),
    ("padded_labels", LOSS, TRAINS),
]
# (configuration, ZeRO stage, what verify names); with the safeguard all of these train
DEEPSPEED = [
    ("mask", 1, ATTENTION),
    ("neftune", 0, EMBEDDING),
    ("entropy", 2, LOSS),
    ("mask", 3, ATTENTION),
    ("entropy", 3, LOSS),
]
Outcomes = dict[Step, str]


def run_steps(names: Sequence[tuple[str, int | None]], folder: Path, *launcher: str) -> Outcomes:
    """Take the first step of each configuration without its safeguard and with it, on two ranks.

    Args:
        names: (configuration, ZeRO stage). At the last stage "dropout" runs too, with `verify` and
            without.
    """
    steps = [
        Step(*name, safeguarded=safeguarded) for name in names for safeguarded in (False, True)
    ]
    zero = names[-1][1]
    steps += [Step("dropout", zero, verify=verify) for verify in ("strict", False)]
    (folder / "cases.json").write_text(json.dumps([asdict(step) for step in steps]))
    run_ranks([*launcher, WORKER, str(folder)], 2)
    outcomes = json.loads((folder / "outcomes.json").read_text())
    return dict(zip(steps, outcomes, strict=True))


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    names = [(name, None) for name, *_ in DDP]
    return run_steps([*names, ("equal_random_states", None)], tmp_path_factory.mktemp("ddp"))


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
    names = [(name, zero) for name, zero, _ in DEEPSPEED]
    folder = tmp_path_factory.mktemp("zero")
    return run_steps([*names, ("equal_random_states", 2)], folder, "-m", "wf_deepspeed")


@pytest.fixture(params=[None, 2], ids=["ddp", "zero2"])
def zero(request: pytest.FixtureRequest) -> int | None:
    return request.param


@pytest.fixture
def outcomes(zero: int | None, request: pytest.FixtureRequest) -> Outcomes:
    """Of the engine with this ZeRO stage."""
    return request.getfixturevalue("ddp" if zero is None else "deepspeed")


def test_verify_changes_no_digit_of_the_first_step(zero: int | None, outcomes: Outcomes) -> None:
    """Neither the loss nor the gradient norm, of a model with dropout."""
    verified, unverified = (
        outcomes[Step("dropout", zero, verify=verify)] for verify in ("strict", False)
    )
    assert verified == unverified
    assert_matches(unverified, TRAINS)


def test_equal_random_states_of_the_ranks_are_found(zero: int | None, outcomes: Outcomes) -> None:
    """Ranks that draw from one seed drop the same rows of their different tokens."""
    name = "equal_random_states"
    message = "drops the same places of different tokens .* first in transformer.drop:"
    assert_matches(outcomes[Step(name, zero, safeguarded=False)], message)
    assert_matches(outcomes[Step(name, zero)], TRAINS)


def assert_matches(outcome: str, pattern: str) -> None:
    assert re.search(pattern, outcome), outcome


@pytest.mark.parametrize(("name", "where", "with_safeguard"), DDP)
def test_verify_finds_what_differs_under_ddp(
    name: str, where: str, with_safeguard: str, ddp: Outcomes
) -> None:
    assert_matches(ddp[Step(name, safeguarded=False)], f"{DIFFERS}: {where} that differs")
    assert_matches(ddp[Step(name)], with_safeguard)


@pytest.mark.deepspeed
@pytest.mark.parametrize(("name", "zero_stage", "where"), DEEPSPEED)
def test_verify_finds_what_differs_under_deepspeed(
    name: str, zero_stage: int, where: str, deepspeed: Outcomes
) -> None:
    without_safeguard = deepspeed[Step(name, zero_stage, safeguarded=False)]
    assert_matches(without_safeguard, f"{DIFFERS}: {where} that differs")
    assert_matches(deepspeed[Step(name, zero_stage)], TRAINS)
