"""Every family of the table gives on ranks what it gives on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import FAMILIES, assert_equal, batch, build  # noqa: E402
from tests.integrations.transformers_models import sequence_parallel  # noqa: E402
from wf_transformers import families, positions  # noqa: E402
from wf_transformers.families import TABLE  # noqa: E402
from wf_transformers.verify import Report  # noqa: E402


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients(name: str, size: int) -> None:
    assert_equal(FAMILIES[name], size, batch())


@pytest.mark.parametrize("name", FAMILIES)
def test_verify_passes(name: str) -> None:
    assert verified(name) is not None


def test_verify_finds_a_row_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-Neo without its windows, and RoBERTa whose positions are not its own."""
    windowless = replace(TABLE["GPTNeoSelfAttention"], window=lambda _: None)
    monkeypatch.setattr(families, "TABLE", {**TABLE, "GPTNeoSelfAttention": windowless})
    monkeypatch.setattr(positions, "CHANGES", ())
    for name in ("gpt_neo", "roberta"):
        with pytest.raises(NotImplementedError, match="does not give what it gives on one"):
            verified(name)


def verified(name: str) -> Report | None:
    models = [build(FAMILIES[name], FAMILIES[name].reference).float() for _ in range(2)]

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        return wf_transformers.verify(
            model, sp, lambda: wf_transformers.attach_model(model, sp), "strict"
        )

    return run_threads(2, rank)[0]


@pytest.mark.parametrize("name", ["opt", "roberta", "gptj"])
def test_all_of_it_can_be_undone(name: str) -> None:
    model = build(FAMILIES[name])
    logits = model(batch()["input_ids"]).logits

    def rank(comm: Any) -> None:
        wf_transformers.attach_model(model, sequence_parallel(comm)).remove()

    run_threads(1, rank)
    assert all("wallfacer" not in vars(module) for module in model.modules())
    assert torch.equal(model(batch()["input_ids"]).logits, logits)


@pytest.mark.parametrize("name", ["opt", "stablelm", "bert", "roberta"])
def test_any_implementation_that_it_was_built_with(name: str) -> None:
    assert_equal(FAMILIES[name], 2, batch(), "eager")
