"""Each family of the table gives on ranks the loss and the gradients of one device.

The reference is the same model with the attention of transformers, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import (  # noqa: E402
    FAMILIES,
    Family,
    NoFloat32,
    batch,
    build,
    copy_and_spoil,
    run_on_one_device,
)
from tests.integrations.results import Result, assert_shares_sum_to, run_on_shard  # noqa: E402
from tests.integrations.transformers_models import gradients, sequence_parallel  # noqa: E402
from wf_transformers.attention import positions  # noqa: E402
from wf_transformers.comparison.verify import Report  # noqa: E402
from wf_transformers.families import table  # noqa: E402
from wf_transformers.families.table import TABLE  # noqa: E402


def assert_exact(
    family: Family,
    size: int,
    implementation: str = "sdpa",
    change_attached: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> None:
    """A model built with `implementation`, attached on `size` ranks, and then changed."""
    expected = run_on_one_device(family, build(family, family.reference), batch())
    models = [build(family, implementation) for _ in range(size)]

    def rank(comm: Any) -> Result:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False), NoFloat32():
            local = sp.shard_batch(batch(), labels_are_shifted=family.masked_lm)
            return run_on_shard(change_attached(model), sp, local)

    assert_shares_sum_to(expected, run_threads(size, rank))


@pytest.mark.filterwarnings("ignore:.*without a KV cache.*make keys and values of their own")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_exact(name: str, size: int) -> None:
    assert_exact(FAMILIES[name], size)


@pytest.mark.parametrize("name", FAMILIES)
def test_deep_copy_of_an_attached_model_is_exact(name: str) -> None:
    """As `torch.optim.swa_utils.AveragedModel` copies a model that trains."""
    assert_exact(FAMILIES[name], 2, change_attached=copy_and_spoil)


@pytest.mark.parametrize("name", ["gptj", "codegen", "gpt_neo"])
def test_logits_in_bfloat16_are_those_of_one_device(name: str) -> None:
    family, ids = FAMILIES[name], {"input_ids": batch()["input_ids"]}
    expected = build(family, family.reference).bfloat16().eval()(**ids).logits

    def rank(comm: Any) -> Tensor:
        sp, model = sequence_parallel(comm), build(family).bfloat16().eval()
        with wf_transformers.attach(model, sp, verify=False):
            inputs = wf_transformers.forward_kwargs(model, sp.shard_batch(ids))
            return sp.unshard(model(**inputs).logits.detach())[:, : ids["input_ids"].shape[1]]

    error = (run_threads(2, rank)[0] - expected).abs().max() / expected.abs().max()
    assert error < 0.05


@pytest.mark.parametrize("name", ["opt", "stablelm", "bert", "roberta", "falcon", "falcon_alibi"])
def test_a_model_built_with_eager_attention_is_exact(name: str) -> None:
    assert_exact(FAMILIES[name], 2, "eager")


def test_documents_of_few_tokens_are_exact() -> None:
    """Rank 0 has the second token of the first document, and not the first one."""
    borders, ids = (0, 3, 4, 23), batch()["input_ids"]
    documents = [ids[:, start:stop] for start, stop in pairwise(borders)]
    models = [build(FAMILIES["roberta"]) for _ in range(3)]
    expected = torch.cat([models[2](x).logits for x in documents], dim=1)

    def rank(comm: Any) -> Tensor:
        sp, model = sequence_parallel(comm, "document_zigzag"), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False):
            local = sp.shard_batch({"input_ids": ids, "cu_seqlens": borders})
            logits = model(**wf_transformers.forward_kwargs(model, local)).logits
            return sp.unshard(logits, cu_seqlens=local["cu_seqlens"])

    for logits in run_threads(2, rank):
        torch.testing.assert_close(logits[:, : ids.shape[1]], expected, rtol=0, atol=1e-9)


def test_positions_that_do_not_count_from_0_are_refused_on_every_rank() -> None:
    """transformers' own count from padding_idx + 1."""
    models = [build(FAMILIES["roberta"]) for _ in range(2)]

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False):
            kwargs = wf_transformers.forward_kwargs(model, sp.shard_batch(batch()))
            with pytest.raises(ValueError, match="must count from 0 .* got 2 for the first token"):
                model(**kwargs | {"position_ids": kwargs["position_ids"] + 2})

    run_threads(2, rank)


def verify_on_two_ranks(name: str) -> Report | None:
    models = [build(FAMILIES[name], FAMILIES[name].reference).float() for _ in range(2)]

    def rank(comm: Any) -> Report | None:
        sp, model = sequence_parallel(comm), models[comm.rank]
        return wf_transformers.verify(
            model, sp, lambda: wf_transformers.attach_model(model, sp), "strict"
        )

    return run_threads(2, rank)[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_verify_passes(name: str) -> None:
    assert verify_on_two_ranks(name) is not None


DIFFERS = "does not give what it gives on one"


def test_verify_finds_a_missing_window(monkeypatch: pytest.MonkeyPatch) -> None:
    windowless = replace(TABLE["GPTNeoSelfAttention"], window=lambda _: None)
    monkeypatch.setattr(table, "TABLE", {**TABLE, "GPTNeoSelfAttention": windowless})
    with pytest.raises(NotImplementedError, match=DIFFERS):
        verify_on_two_ranks("gpt_neo")


def test_verify_finds_wrong_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """RoBERTa counts positions from its padding token's id on."""
    monkeypatch.setattr(positions, "_add_padding_offset", lambda *_: None)
    with pytest.raises(NotImplementedError, match=DIFFERS):
        verify_on_two_ranks("roberta")


DROPOUTS = pytest.mark.parametrize(
    ("name", "option"),
    [("opt", "attention_dropout"), ("gptj", "attn_pdrop"), ("mixtral", "attention_dropout")],
)


def train_with_dropout(size: int, name: str, option: str, steps: Callable[..., Any]) -> list[Any]:
    """steps(backward, model, handle) on each rank; backward() returns fresh gradients."""
    models = [build(FAMILIES[name], **{option: 0.5}) for _ in range(size)]

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with wf_transformers.attach(model, sp, verify=False) as handle:
            inputs = wf_transformers.forward_kwargs(model, sp.shard_batch(batch()))

            def backward() -> list[Tensor]:
                model.zero_grad()
                model(**inputs).logits.square().sum().backward()
                return list(gradients(model).values())

            return steps(backward, model, handle)

    return run_threads(size, rank)


@DROPOUTS
def test_recomputed_layers_drop_the_same_attention_weights(name: str, option: str) -> None:
    """On one rank: ranks as threads would draw from one generator in any order."""

    def steps(backward: Any, model: Any, handle: Any) -> tuple[list[Tensor], ...]:
        torch.manual_seed(5)
        plain = backward()
        torch.manual_seed(5)
        model.gradient_checkpointing_enable()
        return plain, backward(), backward()

    plain, recomputed, next_step = train_with_dropout(1, name, option, steps)[0]
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    assert not all(torch.allclose(a, b) for a, b in zip(plain, next_step, strict=True))


@DROPOUTS
def test_evaluation_drops_no_attention_weights(name: str, option: str) -> None:
    """After a training step, which drops some."""
    family = FAMILIES[name]

    def steps(backward: Any, model: Any, handle: Any) -> Tensor:
        backward()
        local = handle.sp.shard_batch(batch())
        logits = model.eval()(**wf_transformers.forward_kwargs(model, local)).logits
        return handle.sp.unshard(logits.detach())

    expected = build(family).eval()(batch()["input_ids"]).logits
    logits = train_with_dropout(1, name, option, steps)[0]
    torch.testing.assert_close(logits[:, : expected.shape[1]], expected, atol=1e-6, rtol=1e-6)


@DROPOUTS
def test_gradients_with_attention_dropout_are_finite_on_two_ranks(name: str, option: str) -> None:
    grads = train_with_dropout(2, name, option, lambda backward, *_: backward())
    assert all(torch.isfinite(grad).all() for rank_grads in grads for grad in rank_grads)


@pytest.mark.parametrize("name", ["opt", "roberta", "gptj"])
def test_remove_restores_the_model(name: str) -> None:
    model = build(FAMILIES[name])
    expected = model(batch()["input_ids"]).logits

    def rank(comm: Any) -> None:
        wf_transformers.attach_model(model, sequence_parallel(comm)).remove()

    run_threads(1, rank)
    assert all("wallfacer" not in vars(module) for module in model.modules())
    assert torch.equal(model(batch()["input_ids"]).logits, expected)
