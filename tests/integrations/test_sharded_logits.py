"""Log-probabilities, scores and completions of whole batches, on ranks as on one, without TRL."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

transformers = pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import NoFloat32  # noqa: E402
from tests.integrations.transformers_models import gradients, sequence_parallel  # noqa: E402
from wf_transformers.whole_batches.log_probabilities import (  # noqa: E402
    LogProbabilityHooks,
    Rollout,
)
from wf_transformers.whole_batches.sharded_logits import log_softmax_of  # noqa: E402

VOCAB, SAMPLES, SEQLEN, KEPT = 96, 3, 26, 11
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCAB}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
CONFIG: dict[str, Any] = {**SIZES, "pad_token_id": 0, "num_labels": 1}
LENGTHS = ((0, 26), (5, 22), (9, 26))  # a sample begins and ends there; the rest is padding


def build(kind: str) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**CONFIG)
    return getattr(transformers, f"Llama{kind}")(config).double().train()


def batch(left: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCAB, (SAMPLES, SEQLEN), generator=torch.Generator().manual_seed(2))
    mask = torch.zeros_like(ids)
    for row, (start, stop) in zip(mask, LENGTHS, strict=True):
        row[start if left else 0 : stop] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def policy_loss(model: Any) -> tuple[Tensor, Tensor]:
    """As GRPOTrainer has it: log-probabilities of the last tokens, weighted."""
    given = batch()
    logits = model(**given, logits_to_keep=KEPT + 1).logits[:, :-1, :] / 0.7
    found = log_softmax_of(plain, logits, given["input_ids"][:, -KEPT:])
    weights = torch.arange(1, 1 + found.numel(), dtype=found.dtype).view_as(found).cos()
    return (found * weights * given["attention_mask"][:, -KEPT:]).sum(), found.detach()


def preference_loss(model: Any) -> tuple[Tensor, Tensor]:
    """As DPOTrainer has it, and the cross entropy of some samples."""
    given = batch(left=False)
    logits = model(given["input_ids"], attention_mask=given["attention_mask"]).logits
    labels = torch.roll(given["input_ids"], -1, 1)
    mask = torch.roll(given["attention_mask"], -1, 1).bool()
    mask[:, -1] = False  # a prompt begins the samples there
    assert logits.shape == (SAMPLES, SEQLEN, VOCAB)
    found = log_softmax_of(plain, logits, labels.masked_fill(~mask, 0))
    found[~mask] = 0
    chosen, wanted = logits[:2, :-1], labels[:2, :-1].masked_fill(~mask[:2, :-1], 0)
    entropy = cross_entropy(torch.flatten(chosen, end_dim=1), wanted.flatten(), ignore_index=0)
    return found.sum(-1).square().sum() + entropy, logits[1:][mask[1:]].mean().detach()


def scores_loss(model: Any) -> tuple[Tensor, Tensor]:
    found = model(**batch(left=False)).logits
    return found.square().sum(), found.detach()


LOSSES = {
    "policy": (policy_loss, "ForCausalLM"),
    "preference": (preference_loss, "ForCausalLM"),
    "scores": (scores_loss, "ForSequenceClassification"),
}


def attached(model: Any, sp: Any) -> wf_transformers.Handle:
    handle = wf_transformers.attach(model, sp, verify=False)
    LogProbabilityHooks(model, handle)
    return handle


@pytest.mark.parametrize("size", (1, 2, 4))
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients(name: str, size: int) -> None:
    """Only a number for each token is brought together."""
    loss_of, kind = LOSSES[name]
    model = build(kind)
    right, values = loss_of(model)
    right.backward()
    wanted = gradients(model)
    models = [build(kind) for _ in range(size)]

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm), models[comm.rank]
        with attached(model, sp):
            sp.report()
            loss, found = loss_of(model)
            sent = sp.report().get("forward unshard", 0)
            loss.backward()
        return loss.detach(), found, gradients(model), sent

    found = run_threads(size, rank)
    for loss, its, _, sent in found:
        assert (loss - right).abs() < 1e-9 * right.abs()
        live = batch()["attention_mask"][:, -KEPT:] if name == "policy" else torch.ones_like(its)
        assert ((its - values) * live).abs().max() < 1e-9 * values.abs().max()
        assert sent <= 3 * SAMPLES * (SEQLEN + size * 2) * 8 * (size - 1) / size
    for key, gradient in wanted.items():
        summed = sum(own[key] for _, _, own, _ in found) / size  # as engines average
        assert (summed - gradient).abs().max() < 1e-9 * gradient.abs().max(), key


ABSOLUTE = {
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB},
    "OPT": {**SIZES, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
}
ABSOLUTE["GPT2"] |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ABSOLUTE["OPT"] |= {"dropout": 0.0}


@pytest.mark.parametrize("name", ABSOLUTE)
def test_positions_of_samples_with_padding_on_the_left_are_those_of_one_device(name: str) -> None:
    """GPT-2 counts padding, OPT does not."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**ABSOLUTE[name])
    make = transformers.GPT2LMHeadModel if name == "GPT2" else transformers.OPTForCausalLM
    alone = make(config).double()
    given = batch()
    labels, mask = given["input_ids"][:, 1:], given["attention_mask"][:, :-1]
    with NoFloat32():
        wanted = plain(alone(**given).logits[:, :-1], labels).detach()
    models = [copy.deepcopy(alone) for _ in range(2)]

    def rank(comm: Any) -> Tensor:
        model = models[comm.rank]
        with attached(model, sequence_parallel(comm)), NoFloat32():
            return log_softmax_of(plain, model(**given).logits[:, :-1], labels).detach()

    for found in run_threads(2, rank):
        assert ((found - wanted) * mask).abs().max() < 1e-9 * wanted.abs().max()


def test_what_cannot_be_made_of_them_is_refused() -> None:
    model = build("ForCausalLM")

    def rank(comm: Any) -> None:
        with attached(model, sequence_parallel(comm)):
            output = model(**batch(), output_hidden_states=True)
            for use in (
                lambda: output.logits.mean(),
                lambda: output.logits[0, 0],
                lambda: torch.softmax(output.logits, -1),
                lambda: cross_entropy(
                    torch.flatten(output.logits, end_dim=1),
                    batch()["input_ids"].flatten(),
                    label_smoothing=0.1,
                ),
            ):
                with pytest.raises(NotImplementedError, match="lie on the ranks of the sequence"):
                    use()
            with pytest.raises(NotImplementedError, match="output_hidden_states=True"):
                output.hidden_states[-1]
            whole = model(**batch(left=False), whole_logits=True).logits
            assert isinstance(whole, Tensor) and whole.shape == (SAMPLES, SEQLEN, VOCAB)

    run_threads(1, rank)


def test_a_spread_model_generates_as_alone_with_its_parameters_as_they_are() -> None:
    words = {"do_sample": False, "max_new_tokens": 7, "pad_token_id": 0}
    models = [build("ForCausalLM") for _ in range(2)]

    def rank(comm: Any) -> Any:
        model = models[comm.rank]
        rollout = Rollout(model)
        with attached(model, sequence_parallel(comm)) as handle:
            rollout.take_over(handle)
            with torch.no_grad():
                model.lm_head.weight.mul_(2)
            return model.generate(**batch(), **words)

    alone = build("ForCausalLM")
    with torch.no_grad():
        alone.lm_head.weight.mul_(2)
    wanted = alone.generate(**batch(), **words)
    for found in run_threads(2, rank):
        assert torch.equal(found, wanted)
