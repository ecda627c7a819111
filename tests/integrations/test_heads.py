"""Heads over the rows of all ranks: the loss and every gradient are those of one device."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import torch  # noqa: E402
import transformers as tf  # noqa: E402

from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BERT_DROPOUT,
    BUILDING,
    GPT2,
    LLAMA,
    NO_DROPOUT,
    SMALL,
    VOCAB,
    gradients,
    sequence_parallel,
)
from wf_transformers import WholeBatchHooks, attach_model  # noqa: E402

B, S, CHOICES, LABELS = 2, 21, 3, 4
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
}
SEQUENCE = [f"{name}ForSequenceClassification" for name in CONFIGS]
TOKEN = [f"{name}ForTokenClassification" for name in ("Llama", "GPT2", "Bert")]
SPANS = [f"{name}ForQuestionAnswering" for name in ("Llama", "GPT2", "GPTJ", "OPT", "Bert")]
OTHERS = (
    "GPT2DoubleHeadsModel",
    "BertForPreTraining",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
)
CAUSAL = [name for name in (*SEQUENCE, *TOKEN) if "Bert" not in name]


def build(name: str, **more: Any) -> Any:
    """A float64 model in training mode, the same in every thread."""
    family = next(key for key in sorted(CONFIGS, key=len, reverse=True) if name.startswith(key))
    make_config, words = CONFIGS[family]
    with BUILDING:
        torch.manual_seed(1)
        config = make_config(
            **{**words, **COMMON, "num_labels": 2 if name in SPANS else LABELS, **more}
        )
        config._attn_implementation = "eager" if "GPTJ" in name else "sdpa"
        return getattr(tf, name)(config).double().train()


def batch(name: str, padded: bool = False) -> dict[str, Any]:
    drawing = torch.Generator().manual_seed(3)
    several = name.endswith(("DoubleHeadsModel", "MultipleChoice"))
    shape = (B, CHOICES, S) if several else (B, S)
    ids = torch.randint(1, VOCAB, shape, generator=drawing)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if padded:
        given["attention_mask"][0, 15:] = 0
        ids[0, 15:] = 0
    few = torch.randint(2, (B,), generator=drawing)
    if name.endswith("QuestionAnswering"):
        return given | {"start_positions": few + 3, "end_positions": few + 17}
    if name.endswith("DoubleHeadsModel"):
        last = torch.full((B, CHOICES), S - 1)
        return given | {"labels": ids, "mc_labels": few, "mc_token_ids": last}
    if name.endswith("TokenClassification"):
        labels = ids % LABELS
        return given | {"labels": labels.masked_fill(given["attention_mask"] == 0, -100)}
    if name.endswith("PreTraining"):
        return given | {"labels": ids, "next_sentence_label": few}
    if name.endswith("NextSentencePrediction"):
        return given | {"labels": few}
    return given | {"labels": few if several else few + 1}


def trained(model: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    found = model(**given)
    (found.loss + found.get("mc_loss", 0.0)).backward()
    return found, gradients(model)


def on_ranks(name: str, size: int, given: dict[str, Any], **more: Any) -> list[Any]:
    def rank(comm: Any) -> Any:
        model = build(name, **more)
        handle = attach_model(model, sequence_parallel(comm))
        WholeBatchHooks(model, handle)
        found = trained(model, dict(given))
        handle.remove()
        return found

    return run_threads(size, rank)


def assert_same(name: str, size: int, given: dict[str, Any], **more: Any) -> None:
    """The loss and each output that is no row of padding, and the mean of all gradients."""
    # a causal mask of GPT-2 overflows in float64, and right padding is seen by nobody
    plain = {k: x for k, x in given.items() if "GPT2" not in name or k != "attention_mask"}
    alone, wanted = trained(build(name, **more), plain)
    exact = 1e-5 if "GPTJ" in name else 1e-10  # its own attention is in float32
    found = on_ranks(name, size, given, **more)
    for output, _ in found:
        assert output.loss.item() == pytest.approx(alone.loss.item(), rel=exact)
        valid = given["attention_mask"].bool()
        for key, x in alone.items():
            if isinstance(x, torch.Tensor):
                mine = output[key]
                assert mine.shape == x.shape, key
                if x.shape[: valid.dim()] == valid.shape:
                    mine, x = mine[valid], x[valid]
                assert (mine - x).abs().max() < exact * x.abs().max() + 0.01 * exact, key
    for parameter, gradient in wanted.items():
        mean = sum(mine[parameter] for _, mine in found) / size
        assert (mean - gradient).abs().max() < exact * gradient.abs().max() + 0.01 * exact, (
            parameter
        )


@pytest.mark.parametrize("name", [*SEQUENCE, *TOKEN, *SPANS, *OTHERS])
@pytest.mark.parametrize("size", [2, 4])
def test_the_head_gives_what_it_gives_on_one_device(name: str, size: int) -> None:
    assert_same(name, size, batch(name))


@pytest.mark.parametrize("name", CAUSAL)
def test_samples_may_have_different_lengths(name: str) -> None:
    assert_same(name, 2, batch(name, padded=True))
