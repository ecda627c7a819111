"""Calls of an attached model that need the whole sequence, or more than a band, are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers as tf  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BERT_HAS_OWN_REGISTRY,
    batch,
    build,
    model_on_one_rank,
    registered,
    run_registered,
    sequence_parallel,
)
from wf_backends import SequenceParallel  # noqa: E402

IDS = batch(seqlen=8)["input_ids"]
INPUTS: dict[str, Any] = {"input_ids": IDS, "use_cache": False}


# Arguments of the model


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"labels": IDS}, ValueError, "was called with labels: .* sp.loss"),
        ({"position_ids": None}, ValueError, "without position_ids.*forward_kwargs"),
        ({"attention_mask": torch.ones_like(IDS)}, ValueError, "generate on one process"),
        ({"logits_to_keep": 1}, NotImplementedError, "logits_to_keep.*on one process"),
        ({"logits_to_keep": IDS[0]}, NotImplementedError, "logits_to_keep"),
        ({"past_key_values": tf.DynamicCache()}, NotImplementedError, "past_key_values"),
        ({"cache": tf.DynamicCache()}, NotImplementedError, "cache: a KV cache"),
        ({"output_router_logits": True}, NotImplementedError, "output_router_logits"),
    ],
)
def test_arguments_about_the_whole_sequence_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    def rank(sp: SequenceParallel, name: str) -> None:
        model = build("llama", name, {})
        wf_transformers.apply(model, sp)
        positions = torch.arange(IDS.shape[1])[None]
        with pytest.raises(error, match=message):
            model(**INPUTS | {"position_ids": positions} | arguments)

    run_registered(2, rank)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_generate_is_refused(family: str, use_cache: bool) -> None:
    def rank(sp: SequenceParallel, name: str) -> None:
        model = build(family, name, {}).eval()
        wf_transformers.apply(model, sp)
        with pytest.raises((ValueError, NotImplementedError), match="generate on one process"):
            model.generate(IDS, use_cache=use_cache, max_new_tokens=1, pad_token_id=0)

    run_registered(2, rank)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a_kv_cache_is_refused(family: str) -> None:
    message = "1 queries and 9 keys .* KV cache .* generate on one process"
    with model_on_one_rank(family) as model:
        cache = model(IDS, use_cache=True).past_key_values
        with pytest.raises(NotImplementedError, match=message):
            model(IDS[:, :1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("apply", (False, True))
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "mistral"])
def test_output_attentions_is_refused(family: str, apply: bool) -> None:
    with (
        model_on_one_rank(family, apply=apply) as model,
        pytest.raises(NotImplementedError, match="output_attentions=True"),
    ):
        model(**INPUTS, output_attentions=True)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_output_attentions_is_refused_under_activation_checkpointing(family: str) -> None:
    with model_on_one_rank(family) as model:
        model.train().gradient_checkpointing_enable()
        model(**INPUTS, output_attentions=False).logits.sum().backward()
        with pytest.raises(NotImplementedError, match="output_attentions=True"):
            model(**INPUTS, output_attentions=True)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_the_base_model_is_refused_without_positions(family: str) -> None:
    """Users call it for hidden states, from which they compute a loss in chunks."""

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build(family, "eager", {})
        wf_transformers.attach(model, sp)
        local = sp.shard_batch({"input_ids": IDS})["input_ids"]
        with pytest.raises(ValueError, match="without position_ids.*forward_kwargs"):
            model.base_model(input_ids=local)

    run_threads(2, rank)


def test_the_base_model_of_one_that_takes_whole_batches_is_refused() -> None:
    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("llama", "eager", {})
        wf_transformers.WholeBatchHooks(model, wf_transformers.attach(model, sp))
        with pytest.raises(NotImplementedError, match="LlamaModel was called, and not the model"):
            model.model(input_ids=IDS, position_ids=torch.arange(IDS.shape[1])[None])
        model(input_ids=IDS)

    run_threads(2, rank)


@pytest.mark.parametrize("whole_batches", [False, True])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": IDS[0]}, r"input_ids must be .*, got \(8,\)"),
        ({"input_ids": IDS, "labels": IDS[:, :5]}, r"labels must be .*\(1, 8\), got \(1, 5\)"),
    ],
)
def test_tokens_without_samples_and_labels_of_other_tokens_are_refused(
    arguments: dict[str, Any], message: str, whole_batches: bool
) -> None:
    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("llama", "eager", {})
        handle = wf_transformers.attach(model, sp)
        call: Any = handle.shard_batch
        if whole_batches:
            wf_transformers.WholeBatchHooks(model, handle)
            call = lambda batch: model(**batch)  # noqa: E731
        with pytest.raises(ValueError, match=message):
            call(arguments)

    run_threads(2, rank)


# Masks


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(1, 1, 8, 8),  # transformers: full attention, though the layer is causal
        torch.ones(1, 1, 8, 8).tril(-2) * -1e9,
        torch.ones(1, 1, 8, 8).triu(1).bool(),
        torch.tensor([[[[0.0] * 7 + [-1e9]]]]),
    ],
    ids=["full", "lower_triangle", "upper_triangle", "one_key"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_masks_of_four_dims_that_are_no_band_are_refused(family: str, mask: Tensor) -> None:
    with (
        model_on_one_rank(family) as model,
        pytest.raises(ValueError, match="attention_mask of shape"),
    ):
        model(**INPUTS, attention_mask=mask)


def test_a_mask_on_one_rank_alone_is_refused_on_all() -> None:
    errors = "attention_mask of shape", r"ranks \[0\] refuse their own arguments"

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("llama", "eager", {})
        wf_transformers.attach(model, sp)
        local = wf_transformers.forward_kwargs(model, sp.shard_batch({"input_ids": IDS}))
        if comm.rank == 0:
            local["attention_mask"] = torch.eye(local["input_ids"].shape[1])[None, None].bool()
        with pytest.raises(ValueError, match=errors[comm.rank]):
            model(**local)

    run_threads(2, rank)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gpt_neox"])
@pytest.mark.parametrize(
    "padding", [[0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]], ids=["left", "right"]
)
def test_padding_masks_of_local_rows_are_refused(family: str, padding: list[int]) -> None:
    with (
        model_on_one_rank(family) as model,
        pytest.raises(ValueError, match="hides more than causal attention"),
    ):
        model(**INPUTS, attention_mask=torch.tensor([padding]))


def test_padding_masks_of_local_rows_are_refused_under_full_attention() -> None:
    with (
        model_on_one_rank("bert", apply=True) as model,
        pytest.raises(ValueError, match="hides more than full attention"),
    ):
        model(IDS, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]]))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("mask", [torch.ones(1, 8), torch.zeros(1, 1, 1, 1)], ids=["2d", "4d"])
def test_masks_that_hide_nothing_change_nothing(family: str, mask: Tensor) -> None:
    with model_on_one_rank(family) as model:
        expected = model(**INPUTS).logits
        assert torch.equal(model(**INPUTS, attention_mask=mask).logits, expected)


# Arguments of `forward_kwargs`


EMPTY = {"input_ids": torch.ones(2, 8).long(), "attention_mask": torch.tensor([[1] * 8, [0] * 8])}


def test_a_sample_without_tokens_is_refused_under_full_attention() -> None:
    model = build("bert", "sdpa", {})
    with registered() as (sp, _), wf_transformers.attach(model, sp):
        with pytest.raises(ValueError, match=r"lengths \[8, 0\]: leave out"):
            wf_transformers.forward_kwargs(model, EMPTY)


@pytest.mark.skipif(not BERT_HAS_OWN_REGISTRY, reason="the config of this BERT tells the ranks")
def test_ragged_samples_of_a_bert_without_attach_are_refused() -> None:
    with (
        model_on_one_rank("bert", apply=True) as model,
        pytest.raises(ValueError, match="different lengths, and BertForMaskedLM is not attached"),
    ):
        wf_transformers.forward_kwargs(model, EMPTY)


def test_a_batch_without_tokens_is_refused() -> None:
    with (
        model_on_one_rank("llama") as model,
        pytest.raises(ValueError, match=r'"input_ids" must be given, got the keys'),
    ):
        wf_transformers.forward_kwargs(model, {"position_ids": IDS})


# Arguments of the attention function, from other models


CAUSAL = SimpleNamespace(is_causal=True)
FULL = SimpleNamespace(is_causal=False)


@pytest.mark.parametrize(
    ("error", "message", "layer", "arguments"),
    [
        (NotImplementedError, "head masks", CAUSAL, {"head_mask": torch.ones(2)}),
        (NotImplementedError, "an attention bias", CAUSAL, {"position_bias": torch.ones(2)}),
        (NotImplementedError, "attention weights", CAUSAL, {"output_attentions": True}),
        (ValueError, "pass cu_seqlens, global", CAUSAL, {"cu_seq_lens_q": torch.ones(2)}),
        (ValueError, "is_causal must be", SimpleNamespace(is_causal=None), {}),
        (ValueError, r"shape \(1, 4, 4\) is not", CAUSAL, {"attention_mask": torch.ones(1, 4, 4)}),
        (ValueError, "shape dict is not", CAUSAL, {"attention_mask": {}}),
        (
            NotImplementedError,
            "a sliding window of 4 without causal",
            FULL,
            {"sliding_window": 4},
        ),
        (
            NotImplementedError,
            "cross attention",
            SimpleNamespace(is_causal=False, is_cross_attention=True),
            {},
        ),
        (
            NotImplementedError,
            "chunked attention",
            SimpleNamespace(is_causal=True, config=SimpleNamespace(attention_chunk_size=4)),
            {},
        ),
        (
            NotImplementedError,
            "attention weights",
            SimpleNamespace(is_causal=True, config=SimpleNamespace(output_attentions=True)),
            {},
        ),
    ],
)
def test_attention_that_is_more_than_a_band_is_refused(
    error: type[Exception], message: str, layer: Any, arguments: dict[str, Any]
) -> None:
    q = torch.randn(1, 2, 4, 16)
    with registered() as (_, name), pytest.raises(error, match=message):
        ALL_ATTENTION_FUNCTIONS[name](layer, q, q, q, **{"attention_mask": None, **arguments})
