"""Log-probabilities, scores and completions of whole batches on ranks are those of one device.

`LogProbabilityHooks` and `generate_alone` in calls as TRL's trainers make them, without TRL (which
test_preferences.py runs). Ranks are threads, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

transformers = pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import NoFloat32  # noqa: E402
from tests.integrations.mean_gradients import assert_mean_gradients  # noqa: E402
from tests.integrations.media_batches import PATCH_WIDTH, qwen_batch, with_token_types  # noqa: E402
from tests.integrations.media_models import build as build_media_model  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    gradients,
    sequence_parallel,
    stay_in_float64,
)
from wf_transformers.comparison.changes import Changes  # noqa: E402
from wf_transformers.whole_batches.log_probabilities import (  # noqa: E402
    LogProbabilityHooks,
    generate_alone,
)
from wf_transformers.whole_batches.sharded_logits import (  # noqa: E402
    entropies_of,
    log_softmax_of,
)
from wf_transformers.whole_batches.trl_trainers import attach_reference  # noqa: E402

VOCAB, SAMPLES, SEQLEN, COMPLETION = 96, 3, 26, 11
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCAB}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
CONFIG: dict[str, Any] = {**SIZES, "pad_token_id": 0, "num_labels": 1}
SAMPLE_RANGES = ((0, 26), (5, 22), (9, 26))  # (first token, end) of each sample; the rest pads


def build_llama(head: str) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**CONFIG)
    return getattr(transformers, f"Llama{head}")(config).double().train()


def padded_batch(on_the_left: bool = True) -> dict[str, Tensor]:
    """Samples with padding on the right, and on the left, too, if `on_the_left`."""
    ids = torch.randint(1, VOCAB, (SAMPLES, SEQLEN), generator=torch.Generator().manual_seed(2))
    mask = torch.zeros_like(ids)
    for row, (start, stop) in zip(mask, SAMPLE_RANGES, strict=True):
        row[start if on_the_left else 0 : stop] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


def label_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def policy_loss(model: Any) -> tuple[Tensor, Tensor]:
    """As GRPOTrainer: (a weighted sum of the completions' log-probabilities, these)."""
    batch = padded_batch()
    mask = batch["attention_mask"][:, -COMPLETION:]
    logits = model(**batch, logits_to_keep=COMPLETION + 1).logits[:, :-1, :] / 0.7  # temperature
    log_probs = log_softmax_of(label_log_probs, logits, batch["input_ids"][:, -COMPLETION:])
    weights = torch.arange(1, 1 + log_probs.numel(), dtype=log_probs.dtype).view_as(log_probs).cos()
    return (log_probs * weights * mask).sum(), (log_probs * mask).detach()


def preference_loss(model: Any) -> tuple[Tensor, Tensor]:
    """As DPOTrainer: (squares of the samples' log-probabilities and the cross entropy of two
    samples, the mean logit of the other sample's and the second's valid tokens)."""
    batch = padded_batch(on_the_left=False)
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert logits.shape == (SAMPLES, SEQLEN, VOCAB)
    labels = torch.roll(batch["input_ids"], -1, 1)
    valid = torch.roll(batch["attention_mask"], -1, 1).bool()
    valid[:, -1] = False  # the last token has no next one
    log_probs = log_softmax_of(label_log_probs, logits, labels.masked_fill(~valid, 0))
    log_probs[~valid] = 0
    chosen, targets = logits[:2, :-1], labels[:2, :-1].masked_fill(~valid[:2, :-1], 0)
    entropy = cross_entropy(torch.flatten(chosen, end_dim=1), targets.flatten(), ignore_index=0)
    return log_probs.sum(-1).square().sum() + entropy, logits[1:][valid[1:]].mean().detach()


def label_entropies(logits: Tensor) -> Tensor:
    return -(logits.log_softmax(-1).exp() * logits.log_softmax(-1)).sum(-1)


def paired_loss(model: Any) -> tuple[Tensor, Tensor]:
    """As DPOTrainer and KTOTrainer from TRL 0.29 to 1.14: (squares of the samples'
    log-probabilities and the cross entropy of the second half's valid tokens; for the log the
    entropies and the first half's mean logits)."""
    batch = padded_batch(on_the_left=False)
    logits = model(**batch).logits[..., :-1, :].contiguous().div_(0.7)
    labels, valid = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:].bool()
    log_probs = log_softmax_of(label_log_probs, logits, labels) * valid
    _, rejected = logits.chunk(2, dim=0)
    assert rejected.size(0) == 1
    entropy = cross_entropy(rejected[valid[2:]], labels[2:][valid[2:]])
    first = torch.tensor([0, 1])
    chosen = logits.detach().index_select(0, first)
    with torch.no_grad():
        entropies = entropies_of(label_entropies, logits.detach())[valid]
    means = chosen[valid[first]].mean(-1)
    return log_probs.sum(-1).square().sum() + entropy, torch.cat((entropies, means))


def odds_loss(model: Any) -> tuple[Tensor, Tensor]:
    """As ORPOTrainer and KTOTrainer: (the cross entropy of two samples, for the log the mean of
    their logits and others' sum)."""
    ids = padded_batch()["input_ids"].clamp(min=1)  # without padding: the mean covers it
    logits = model(ids).logits
    chosen = logits[[0, 1], ...][..., :-1, :].contiguous()
    chosen = chosen.view(-1, chosen.shape[-1])
    labels = ids[:2, 1:].flatten().to(chosen.device)
    logged = logits[1:, :-1, :].detach().mean() + logits[[2]].nansum()
    return torch.nn.CrossEntropyLoss()(chosen, labels), logged


def score_loss(model: Any) -> tuple[Tensor, Tensor]:
    """As RewardTrainer: (the sum of the squared scores, the scores)."""
    scores = model(**padded_batch(on_the_left=False)).logits
    return scores.square().sum(), scores.detach()


LOSSES = {
    "policy": (policy_loss, "ForCausalLM"),
    "preference": (preference_loss, "ForCausalLM"),
    "paired": (paired_loss, "ForCausalLM"),
    "odds": (odds_loss, "ForCausalLM"),
    "scores": (score_loss, "ForSequenceClassification"),
}


def attach_with_hooks(model: Any, sp: Any, whole_logits: bool = False) -> wf_transformers.Handle:
    handle = wf_transformers.attach(model, sp, verify=False)
    LogProbabilityHooks(model, handle, whole_logits)
    return handle


@pytest.mark.parametrize("size", (1, 2, 4))
@pytest.mark.parametrize("name", LOSSES)
def test_losses_values_and_gradients_are_those_of_one_device(name: str, size: int) -> None:
    """Ranks exchange at most three numbers per token and no logits."""
    loss_of, head = LOSSES[name]
    reference = build_llama(head)
    expected, expected_values = loss_of(reference)
    expected.backward()
    models = [build_llama(head) for _ in range(size)]

    def rank(comm: Any) -> tuple[Tensor, Tensor, dict[str, Tensor], float]:
        model, sp = models[comm.rank], sequence_parallel(comm)
        with attach_with_hooks(model, sp):
            sp.report()
            loss, values = loss_of(model)
            sent = sp.report().get("forward unshard", 0)
            loss.backward()
        return loss.detach(), values, gradients(model), sent

    results = run_threads(size, rank)
    padded_tokens = SAMPLES * (SEQLEN + size * 2)
    for loss, values, _, sent in results:
        assert (loss - expected).abs() < 1e-9 * expected.abs()
        assert (values - expected_values).abs().max() < 1e-9 * expected_values.abs().max()
        assert sent <= 3 * padded_tokens * 8 * (size - 1) / size  # 8 bytes in float64
    rank_gradients = [grads for _, _, grads, _ in results]
    assert_mean_gradients(rank_gradients, gradients(reference), 1e-9, absolute=0.0)


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": SEQLEN, "vocab_size": VOCAB}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {**SIZES, "ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32}
OPT |= {"dropout": 0.0}


def build_gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))


def build_opt() -> Any:
    return transformers.OPTForCausalLM(transformers.OPTConfig(**OPT))


@pytest.mark.parametrize("build", [build_gpt2, build_opt])
def test_absolute_positions_after_padding_on_the_left_are_those_of_one_device(
    build: Callable[[], Any],
) -> None:
    """GPT-2 counts padding, OPT does not."""
    torch.manual_seed(1)
    reference = build().double()
    batch = padded_batch()
    labels, mask = batch["input_ids"][:, 1:], batch["attention_mask"][:, :-1]
    with NoFloat32():
        expected = label_log_probs(reference(**batch).logits[:, :-1], labels).detach()
    models = [copy.deepcopy(reference) for _ in range(2)]

    def rank(comm: Any) -> Tensor:
        model = models[comm.rank]
        with attach_with_hooks(model, sequence_parallel(comm)), NoFloat32():
            logits = model(**batch).logits[:, :-1]
            return log_softmax_of(label_log_probs, logits, labels).detach()

    for log_probs in run_threads(2, rank):
        assert ((log_probs - expected) * mask).abs().max() < 1e-9 * expected.abs().max()


def test_pixels_are_not_moved_if_there_are_as_many_tokens_as_pixels_of_a_patch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stay_in_float64(monkeypatch)
    inputs = {key: x for key, x in qwen_batch().items() if key != "labels"}
    added = PATCH_WIDTH - inputs["input_ids"].shape[1]
    inputs = {k: pad(x, (0, added), value=3) if k == "input_ids" else x for k, x in inputs.items()}
    inputs = with_token_types(inputs)
    expected = build_media_model("qwen2_vl")(**inputs, use_cache=False).logits.mean(-1).detach()

    def rank(comm: Any) -> Tensor:
        model = build_media_model("qwen2_vl")
        with attach_with_hooks(model, sequence_parallel(comm)):
            return model(**inputs).logits.row_means().detach()

    for means in run_threads(2, rank):
        assert (means - expected).abs().max() < 1e-9 * expected.abs().max()


USES_OF_LOGITS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda logits: logits.mean(),
    "one token": lambda logits: logits[0, 0],
    "chunks of tokens": lambda logits: logits.chunk(2, dim=1),
    "selected tokens": lambda logits: logits.index_select(1, torch.tensor([0])),
    "a mean over samples": lambda logits: logits[torch.ones(3, 26, dtype=torch.bool)].mean(0),
    "softmax": lambda logits: torch.softmax(logits, -1),
    "smoothed cross entropy": lambda logits: cross_entropy(
        torch.flatten(logits, end_dim=1),
        padded_batch()["input_ids"].flatten(),
        label_smoothing=0.1,
    ),
}


@pytest.mark.parametrize("use", USES_OF_LOGITS.values(), ids=USES_OF_LOGITS)
def test_other_uses_of_sharded_logits_are_refused(use: Callable[[Any], Any]) -> None:
    model = build_llama("ForCausalLM")

    def rank(comm: Any) -> None:
        with attach_with_hooks(model, sequence_parallel(comm)):
            logits = model(**padded_batch()).logits
            with pytest.raises(NotImplementedError, match="lie on the ranks of the sequence"):
                use(logits)

    run_threads(1, rank)


def test_use_of_hidden_states_is_refused() -> None:
    model = build_llama("ForCausalLM")

    def rank(comm: Any) -> None:
        with attach_with_hooks(model, sequence_parallel(comm)):
            output = model(**padded_batch(), output_hidden_states=True)
            with pytest.raises(NotImplementedError, match="output_hidden_states=True"):
                output.hidden_states[-1]

    run_threads(1, rank)


@pytest.mark.parametrize("always", (False, True))
def test_whole_logits_are_a_tensor(always: bool) -> None:
    """Those that a call asks for, and those of all calls after connect_trainer(whole_logits=)."""
    model = build_llama("ForCausalLM")
    asked = {} if always else {"whole_logits": True}

    def rank(comm: Any) -> None:
        with attach_with_hooks(model, sequence_parallel(comm), always):
            logits = model(**padded_batch(on_the_left=False), **asked).logits
            assert isinstance(logits, Tensor) and logits.shape == (SAMPLES, SEQLEN, VOCAB)

    run_threads(1, rank)


def test_the_reference_of_a_trainer_with_whole_logits_has_them_too() -> None:
    model, trainer = (
        build_llama("ForCausalLM"),
        SimpleNamespace(ref_model=build_llama("ForCausalLM")),
    )

    def rank(comm: Any) -> None:
        with attach_with_hooks(model, sequence_parallel(comm)) as handle:
            attach_reference(trainer, handle, whole_logits=True)
            batch = padded_batch(on_the_left=False)
            assert isinstance(trainer.ref_model(**batch).logits, Tensor)

    run_threads(1, rank)


def test_a_rollout_generates_with_the_current_parameters_as_one_device() -> None:
    """A step between attaching and generating doubles the head's weight."""
    options = {"do_sample": False, "max_new_tokens": 7, "pad_token_id": 0}
    reference = build_llama("ForCausalLM")
    with torch.no_grad():
        reference.lm_head.weight.mul_(2)
    expected = reference.generate(**padded_batch(), **options)
    models = [build_llama("ForCausalLM") for _ in range(2)]

    def rank(comm: Any) -> Tensor:
        model = models[comm.rank]
        changes = Changes(model)
        with changes.recorded():
            handle = attach_with_hooks(model, sequence_parallel(comm))
        with handle:
            generate_alone(model, handle, changes)
            with torch.no_grad():
                model.lm_head.weight.mul_(2)
            return model.generate(**padded_batch(), **options)

    for completions in run_threads(2, rank):
        assert torch.equal(completions, expected)
