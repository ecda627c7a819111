"""Task heads over all ranks' tokens (classification, spans, multiple choice, ...) are exact.

The reference is the same model on one device, in float64. Models take whole batches.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from torch import Tensor  # noqa: E402

from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BERT_DROPOUT,
    BUILD_LOCK,
    GPT2,
    LLAMA,
    NO_DROPOUT,
    SMALL,
    VOCAB,
    gradients,
    one_rank,
    sequence_parallel,
)
from tests.integrations.verify_models import DIFFERS, verify_on_ranks  # noqa: E402
from wf_transformers import WholeBatchHooks, attach_model  # noqa: E402
from wf_transformers.comparison.random_batch import random_batch  # noqa: E402

BATCH_SIZE, SEQLEN, NUM_CHOICES, NUM_LABELS = 2, 21, 3, 4  # 21: padded on 2 and 4 ranks
POSITIONS = {"num_attention_heads": 4, "max_position_embeddings": 64}
COMMON = {"pad_token_id": 0, "initializer_range": 0.2, "classifier_dropout": 0.0}
OPT = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48, "num_hidden_layers": 2}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Llama": (tf.LlamaConfig, LLAMA),
    "Mistral": (tf.MistralConfig, {**LLAMA, "sliding_window": 5}),
    "Qwen2": (tf.Qwen2Config, LLAMA),
    "GPT2": (tf.GPT2Config, {**GPT2, **NO_DROPOUT, "summary_first_dropout": 0.0}),
    "GPTJ": (tf.GPTJConfig, {**GPT2, **NO_DROPOUT, "rotary_dim": 4}),
    "OPT": (tf.OPTConfig, {**OPT, **POSITIONS, "vocab_size": VOCAB, "dropout": 0.0}),
    "Bert": (tf.BertConfig, {**SMALL, **BERT_DROPOUT, **POSITIONS}),
    "Roberta": (tf.RobertaConfig, {**SMALL, **BERT_DROPOUT, **POSITIONS}),
    "ModernBert": (
        tf.ModernBertConfig,
        {**SMALL, **POSITIONS, "local_attention": 6, "global_attn_every_n_layers": 2},
    ),
}
if hasattr(tf, "NomicBertConfig"):  # of transformers 5
    CONFIGS["NomicBert"] = (tf.NomicBertConfig, {**SMALL, **BERT_DROPOUT, **POSITIONS})
SEQUENCE = [f"{name}ForSequenceClassification" for name in CONFIGS]
TOKEN = [f"{name}ForTokenClassification" for name in ("Llama", "GPT2", "Bert", "ModernBert")]
MASKED = [f"{name}ForMaskedLM" for name in ("Bert", "Roberta")]
SPANS = [f"{name}ForQuestionAnswering" for name in ("Llama", "GPT2", "GPTJ", "OPT", "Bert")]
OTHERS = (
    "GPT2DoubleHeadsModel",
    "BertForPreTraining",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
)


def build(name: str) -> Any:
    """A float64 model in training mode; random, the same every time."""
    family = next(key for key in CONFIGS if name.startswith(key))
    config_class, sizes = CONFIGS[family]
    num_labels = 2 if name in SPANS else NUM_LABELS
    with BUILD_LOCK:
        torch.manual_seed(1)
        config = config_class(**{**sizes, **COMMON, "num_labels": num_labels})
        config._attn_implementation = "eager" if family == "GPTJ" else "sdpa"
        return getattr(tf, name)(config).double().train()


def batch(name: str, padded: bool = False) -> dict[str, Any]:
    """Tokens, and the labels of the model's head; the first sample has 15 tokens if `padded`."""
    drawing = torch.Generator().manual_seed(3)
    has_choices = name.endswith(("DoubleHeadsModel", "MultipleChoice"))
    shape = (BATCH_SIZE, NUM_CHOICES, SEQLEN) if has_choices else (BATCH_SIZE, SEQLEN)
    ids = torch.randint(1, VOCAB, shape, generator=drawing)
    mask = torch.ones_like(ids)
    if padded:
        ids[0, 15:] = mask[0, 15:] = 0
    binary = torch.randint(2, (BATCH_SIZE,), generator=drawing)
    return {"input_ids": ids, "attention_mask": mask} | labels(name, ids, mask, binary)


def labels(name: str, ids: Tensor, mask: Tensor, binary: Tensor) -> dict[str, Tensor]:
    """By the kind of head; `binary` (b,) is drawn from 0 and 1."""
    if name.endswith("QuestionAnswering"):
        return {"start_positions": binary + 3, "end_positions": binary + 17}
    if name.endswith("DoubleHeadsModel"):
        last = torch.full((BATCH_SIZE, NUM_CHOICES), SEQLEN - 1)
        return {"labels": ids, "mc_labels": binary, "mc_token_ids": last}
    if name.endswith("TokenClassification"):
        return {"labels": (ids % NUM_LABELS).masked_fill(mask == 0, -100)}
    if name.endswith("MaskedLM"):
        return {"labels": ids.masked_fill((mask == 0) | (ids % 3 == 0), -100)}
    if name.endswith("PreTraining"):
        return {"labels": ids, "next_sentence_label": binary}
    if name.endswith(("NextSentencePrediction", "MultipleChoice")):
        return {"labels": binary}
    return {"labels": binary + 1}


def train(model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """(output, gradients); the losses of several heads are summed."""
    output = model(**inputs)
    (output.loss + output.get("mc_loss", 0.0)).backward()
    return output, gradients(model)


def train_on_one_device(name: str, inputs: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    if name.startswith("GPT2"):
        # The additive mask of GPT-2 overflows in float64, and no token sees right padding.
        inputs = {k: x for k, x in inputs.items() if k != "attention_mask"}
    return train(build(name), inputs)


def assert_exact(name: str, size: int, inputs: dict[str, Any]) -> None:
    """On `size` ranks: loss, outputs outside of padding, and the mean of the ranks' gradients."""

    def rank(comm: Any) -> tuple[Any, dict[str, Tensor]]:
        model = build(name)
        handle = attach_model(model, sequence_parallel(comm))
        WholeBatchHooks(model, handle, whole_logits=True)
        output, grads = train(model, dict(inputs))
        handle.remove()
        return output, grads

    tolerance = 1e-5 if name.startswith("GPTJ") else 1e-10  # GPT-J computes scores in float32
    expected, expected_grads = train_on_one_device(name, inputs)
    ranks = run_threads(size, rank)
    for output, grads in ranks:
        assert grads.keys() == expected_grads.keys()
        assert output.loss.item() == pytest.approx(expected.loss.item(), rel=tolerance)
        assert_same_outputs(output, expected, inputs["attention_mask"].bool(), tolerance)
    for parameter, grad in expected_grads.items():
        mean = sum(grads[parameter] for _, grads in ranks) / size
        assert_near(mean, grad, tolerance, parameter)


def assert_same_outputs(output: Any, expected: Any, valid: Tensor, tolerance: float) -> None:
    """Each tensor; of those with a value for each token only the `valid` tokens."""
    for key, reference in expected.items():
        if not isinstance(reference, Tensor):
            continue
        actual = output[key]
        assert actual.shape == reference.shape, key
        if reference.shape[: valid.dim()] == valid.shape:
            actual, reference = actual[valid], reference[valid]
        assert_near(actual, reference, tolerance, key)


def assert_near(actual: Any, expected: Tensor, tolerance: float, name: str) -> None:
    """Relative to the largest element; below 0.01 absolutely, for gradients that are rounding."""
    error = (actual - expected).abs().max()
    assert error < tolerance * (expected.abs().max() + 0.01), name


@pytest.mark.parametrize("name", [*SEQUENCE, *TOKEN, *SPANS, *OTHERS])
@pytest.mark.parametrize("size", [2, 4])
def test_heads_are_exact(name: str, size: int) -> None:
    assert_exact(name, size, batch(name))


@pytest.mark.parametrize("name", [*SEQUENCE, *TOKEN, *MASKED])
def test_ragged_samples_are_exact(name: str) -> None:
    """Their padding hides behind causal attention; under full attention each has its own mask."""
    assert_exact(name, 2, batch(name, padded=True))


@pytest.mark.parametrize("padded", [False, True])
def test_the_positions_of_a_roberta_on_one_rank_are_exact(padded: bool) -> None:
    assert_exact("RobertaForMaskedLM", 1, batch("RobertaForMaskedLM", padded))


def test_a_model_of_multiple_choice_is_compared_on_a_drawn_batch() -> None:
    reports = verify_on_ranks(lambda: build("BertForMultipleChoice"), whole_batches=True)
    assert all(report is not None and report.compared >= 30 for report in reports)


def test_no_batch_is_drawn_for_a_model_of_multiple_choice_with_too_few_positions() -> None:
    """It was a batch without arguments, which the model could not run."""
    model = build("BertForMultipleChoice")
    model.config.max_position_embeddings = 1
    assert random_batch(model, one_rank()) is None


def test_a_model_of_multiple_choice_that_mixes_the_tokens_of_a_rank_is_refused() -> None:
    """As MobileBERT's embeddings do: each reads the token before."""

    def shifted() -> Any:
        model = build("BertForMultipleChoice")
        embedding = model.bert.embeddings.word_embeddings
        embedding.register_forward_hook(lambda _, __, x: x + x.roll(1, dims=1))
        return model

    with pytest.raises(NotImplementedError, match=DIFFERS):
        verify_on_ranks(shifted, whole_batches=True)


def test_a_classifier_called_without_tokens_is_refused_by_name() -> None:
    def rank(comm: Any) -> None:
        model = build("LlamaForSequenceClassification")
        WholeBatchHooks(model, attach_model(model, sequence_parallel(comm)))
        model(labels=torch.ones(1))

    with pytest.raises(ValueError, match=r'"input_ids" must be given'):
        run_threads(1, rank)
