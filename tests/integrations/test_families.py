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
from wf_transformers import positions  # noqa: E402
from wf_transformers.comparison.verify import Report  # noqa: E402
from wf_transformers.families import table  # noqa: E402
from wf_transformers.families.table import TABLE  # noqa: E402


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients(name: str, size: int) -> None:
    assert_equal(FAMILIES[name], size, batch())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_copy_of_an_attached_model(name: str) -> None:
    """As an average of weights over steps makes it: by its own parameters, on the same ranks."""
    assert_equal(FAMILIES[name], 2, batch(), twin=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_verify_passes(name: str) -> None:
    assert verified(name) is not None


def test_verify_finds_a_row_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-Neo without its windows, and RoBERTa whose positions are not its own."""
    windowless = replace(TABLE["GPTNeoSelfAttention"], window=lambda _: None)
    monkeypatch.setattr(table, "TABLE", {**TABLE, "GPTNeoSelfAttention": windowless})
    monkeypatch.setattr(positions, "_add_padding_offset", lambda *_: None)
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


@pytest.mark.parametrize(
    ("name", "key"),
    [("opt", "attention_dropout"), ("gptj", "attn_pdrop"), ("mixtral", "attention_dropout")],
)
def test_attention_dropout_in_training(name: str, key: str) -> None:
    """A recomputed layer drops the same weights, another step others, and evaluation none."""
    family = FAMILIES[name]

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), build(family, **{key: 0.5})
        with wf_transformers.attach(model, sp, verify=False) as handle:
            words = wf_transformers.forward_kwargs(model, sp.shard_batch(batch()))

            def step() -> list[torch.Tensor]:
                model.zero_grad()
                model(**words).logits.square().sum().backward()
                return [p.grad for p in model.parameters() if p.grad is not None]

            if sp.size > 1:  # threads share torch's generator: what is drawn again differs
                return step()
            found = []
            for recompute in (False, True):
                torch.manual_seed(5)
                if recompute:
                    model.gradient_checkpointing_enable(handle.checkpoint_kwargs)
                found.append(step())
            return *found, step(), sp.unshard(model.eval()(**words).logits.detach())

    plain, again, other, logits = run_threads(1, rank)[0]
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert any(not torch.allclose(a, b) for a, b in zip(plain, other, strict=True))
    whole = build(family)(batch()["input_ids"]).logits if family.trains else logits
    torch.testing.assert_close(logits[:, :23], whole, atol=1e-6, rtol=1e-6)
    assert all(torch.isfinite(p).all() for found in run_threads(2, rank) for p in found)


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
