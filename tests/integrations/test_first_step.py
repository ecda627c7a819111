"""Models that would silently train to another result on two ranks, which are threads here.

Without the safeguard that a model needs, `verify` must name what differs from one rank; with it,
the model must train, or be refused by the safeguard. Real Trainers: test_first_step_trainers.py.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import transformers as tf  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations import removed_safeguards as removed  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    FAMILIES,
    batch,
    build,
    sequence_parallel,
)
from tests.integrations.verify_models import (  # noqa: E402
    DIFFERS,
    Convolution,
    TokenShift,
    llama,
    verify_on_ranks,
    vision_model,
)
from wf_transformers import (  # noqa: E402
    ModelOptions,
    WholeBatchHooks,
    attach_by,
    attach_model,
    attach_pretrained,
    forward_kwargs,
)
from wf_transformers.attention.documents import Documents  # noqa: E402
from wf_transformers.comparison.first_step import shorten  # noqa: E402

STRICT = ModelOptions(verify="strict")
TRAINS = nullcontext()
"""The outcome with a safeguard, where the safeguard refuses nothing."""


def train_on_two_ranks(original: nn.Module, labelled: dict[str, Any]) -> None:
    """Verify the model, then train one step of whole batches, as the entry functions do."""

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), copy.deepcopy(original)

        def attach() -> Any:
            handle = attach_model(model, sp)
            WholeBatchHooks(model, handle)
            return handle

        wf_transformers.verify(model, sp, attach, "strict", whole_batches=True)
        handle = attach_by(STRICT, model, sp, attach)
        model(**labelled).loss.backward()
        handle.remove()

    run_threads(2, rank)


def llama_with_learned_scale() -> Any:
    """Its scores are multiplied by a parameter."""
    model = build("llama", "eager", {}).float()
    for layer in model.model.layers:
        scale = layer.self_attn.scaling
        del layer.self_attn.scaling
        layer.self_attn.scaling = nn.Parameter(torch.tensor(scale))
    return model


PADDED = batch(2, 24, attention_mask=(torch.arange(24) < 17).long().expand(2, -1))


@pytest.mark.filterwarnings("ignore:14 labels of this batch")
@pytest.mark.parametrize(
    ("make_model", "labelled", "without_safeguard", "where", "with_safeguard"),
    [
        pytest.param(
            lambda: build("bert", "sdpa", {}),
            PADDED,
            removed.counted_labels_at_padding,
            "its loss",
            TRAINS,
            id="labels at padding",
        ),
        pytest.param(
            llama_with_learned_scale,
            batch(),
            removed.constant_softmax_scale,
            "the gradient of model.layers.0.self_attn.scaling",
            pytest.raises(ValueError, match="softmax_scale must be a number"),
            id="learned scale",
        ),
    ],
)
def test_verify_of_whole_batches_finds_what_differs(
    make_model: Callable[[], nn.Module],
    labelled: dict[str, Any],
    without_safeguard: Callable[[], removed.Context],
    where: str,
    with_safeguard: AbstractContextManager[Any],
) -> None:
    differs = pytest.raises(NotImplementedError, match=f"{DIFFERS}: {where} is the first")
    with without_safeguard(), differs:
        train_on_two_ranks(make_model().float(), labelled)
    with with_safeguard:
        train_on_two_ranks(make_model().float(), labelled)


ROWS_RULE = "only attention may mix tokens|every rank would take its rows"


@pytest.mark.parametrize(
    ("make_model", "where"),
    [
        pytest.param(Convolution, "the output of conv is the first", id="convolution"),
        pytest.param(partial(vision_model, "DPT"), "no module of", id="DPT"),
    ],
)
def test_verify_finds_what_the_check_of_rows_refuses(
    make_model: Callable[[], nn.Module], where: str
) -> None:
    """Modules around a Hugging Face model that mix tokens, and models whose rows nobody cuts."""
    without_check = patch.object(Documents, "check_rows", lambda *_: None)
    with without_check, pytest.raises(NotImplementedError, match=where):
        verify_on_ranks(make_model)
    original = make_model().float()

    def rank(comm: Any) -> None:
        model = copy.deepcopy(original)
        attach_model(model, sequence_parallel(comm))
        model(pixel_values=torch.ones(1, 1, 8, 8))

    with pytest.raises(NotImplementedError, match=ROWS_RULE):
        run_threads(2, rank)


def test_verify_finds_what_no_check_of_a_model_refuses() -> None:
    """A forward of Llama's class that mixes tokens: `attach_model` takes it for Llama's."""
    first = "the output of model.layers.0.input_layernorm is the"
    with pytest.raises(NotImplementedError, match=first):
        verify_on_ranks(lambda: llama(TokenShift))
    original = llama(TokenShift).float()
    run_threads(
        2, lambda comm: attach_model(copy.deepcopy(original), sequence_parallel(comm)).remove()
    )


def call_inner_model(
    original: nn.Module, whole_batches: bool, names: tuple[str, ...] = (), **batch_options: Any
) -> None:
    """Call the model inside twice, as a user's own loop may, then the model, on two ranks.

    Args:
        names: of the arguments for the model inside; none: all.
    """
    labelled = batch(1, 24, **batch_options)

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), copy.deepcopy(original)
        handle = attach_by(STRICT, model, sp, lambda: attach_model(model, sp))
        if whole_batches:
            WholeBatchHooks(model, handle)
            arguments = labelled
        else:
            arguments = forward_kwargs(model, handle.shard_batch(labelled))
        for _ in range(2):
            model.base_model(**{name: arguments[name] for name in names or arguments})
        model(**arguments)
        handle.remove()

    run_threads(2, rank)


@pytest.mark.parametrize(
    ("whole_batches", "where", "refusal"),
    [
        (False, "the output of rotary_emb", "LlamaModel was called without position_ids"),
        (True, "the output of layers.0.self_attn.o_proj", "and not the model around it"),
    ],
)
def test_verify_finds_an_inner_model_that_is_called_by_itself(
    whole_batches: bool, where: str, refusal: str
) -> None:
    original = build("llama", "sdpa", {}).float()
    differs = f"{DIFFERS}: {where} is the first .* random batch, with input_ids alone as here"
    without_safeguard = removed.allowed_inner_calls()
    with without_safeguard, pytest.raises(NotImplementedError, match=differs):
        call_inner_model(original, whole_batches, ("input_ids",))
    with pytest.raises((ValueError, NotImplementedError), match=refusal):
        call_inner_model(original, whole_batches, ("input_ids",))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_inner_model_may_be_called_with_all_arguments_of_its_rows(family: str) -> None:
    call_inner_model(build(family, "sdpa", {}).float(), whole_batches=False)


@pytest.mark.parametrize("family", ["llama", "mistral"])  # of FAMILIES, these take documents
def test_an_inner_model_may_be_called_with_documents(family: str) -> None:
    original = build(family, "sdpa", {}).float()
    call_inner_model(original, whole_batches=False, cu_seqlens=(0, 9, 24))


class WeightedConvolution(Convolution):
    """Mixes neighbouring tokens; `verify` cannot draw its argument `weights`."""

    def forward(self, input_ids: Tensor, weights: Tensor, **inputs: Any) -> Tensor:
        return super().forward(input_ids, **inputs) * weights[..., None]


@pytest.mark.parametrize(
    ("kernel_size", "outcome"),
    [
        (3, pytest.raises(NotImplementedError, match="the output of conv is the first")),
        (1, TRAINS),
    ],
    ids=["mixes tokens", "mixes none"],
)
def test_a_model_whose_arguments_cannot_be_drawn_is_compared_on_its_first_batch(
    kernel_size: int, outcome: AbstractContextManager[Any]
) -> None:
    """On a part of it, when `shard_batch` cuts it in a user's own loop; here with documents."""
    original = WeightedConvolution().float()
    original.conv = nn.Conv1d(61, 61, kernel_size, padding=kernel_size // 2)
    first_batch = batch(1, 40, weights=torch.rand(1, 40), cu_seqlens=(0, 9, 40))

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), copy.deepcopy(original)
        handle = attach_by(STRICT, model, sp, lambda: attach_pretrained(model, sp))
        handle.shard_batch(first_batch)

    with outcome:
        run_threads(2, rank)


def test_a_model_that_draws_from_numpy_is_compared_with_equal_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Whisper's SpecAugment does; the comparison leaves the random state as it was."""
    own = threading.local()  # each rank is a process elsewhere
    for name in ("rand", "get_state", "set_state"):
        monkeypatch.setattr(np.random, name, lambda *x, name=name: getattr(own.state, name)(*x))

    def rank(comm: Any) -> float:
        own.state = np.random.RandomState(5)
        sp, model = sequence_parallel(comm), build("llama", "sdpa", {}).float()
        embedding = model.get_input_embeddings()
        embedding.register_forward_hook(lambda _, __, rows: rows * np.random.rand())
        handle = attach_by(STRICT, model, sp, lambda: attach_model(model, sp))
        handle.shard_batch(batch(2, 24))
        return np.random.rand()

    assert run_threads(2, rank) == [np.random.RandomState(5).rand()] * 2


@pytest.mark.parametrize("seqlens", [(1, 4), (2, 24)])
def test_a_batch_of_one_or_two_tokens_is_trained_and_a_later_one_is_compared(
    seqlens: tuple[int, int],
) -> None:
    def rank(comm: Any) -> list[bool]:
        sp, model = sequence_parallel(comm), build("llama", "sdpa", {}).float()
        handle = attach_by(STRICT, model, sp, lambda: attach_model(model, sp))
        awaits = []
        for seqlen in seqlens:
            handle.shard_batch(batch(2, seqlen))
            awaits.append(handle.awaits_first)
        return awaits

    assert run_threads(2, rank) == [[True, False]] * 2


class Attends(nn.Module):
    """A model without parameters."""

    def set_sequence_parallel(self, sp: Any) -> None:
        self.sp = sp

    def forward(self, input_ids: Tensor, position_ids: Any = None) -> Tensor:
        x = input_ids[..., None, None].double().expand(-1, -1, 2, 8) / 32
        return self.sp.attention(x, x, x, causal=True).flatten(2)


def test_a_model_without_parameters_is_compared() -> None:
    def rank(comm: Any) -> bool:
        sp, model = sequence_parallel(comm), Attends()
        handle = attach_by(STRICT, model, sp, lambda: attach_model(model, sp))
        handle.shard_batch(batch(2, 24))
        return handle.awaits_first

    assert run_threads(2, rank) == [False] * 2


def test_parts_of_a_single_row_are_compared() -> None:
    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm, "contiguous"), build("llama", "sdpa", {}).float()
        handle = attach_by(STRICT, model, sp, lambda: attach_model(model, sp))
        handle.shard_batch(batch(2, 4))

    run_threads(4, rank)


def test_a_classifier_with_as_many_classes_as_a_rank_has_tokens_is_compared() -> None:
    """12 tokens of the random batch."""

    def classifier() -> Any:
        config = build("llama", "sdpa", {"num_labels": 12, "pad_token_id": 0}).config
        return tf.LlamaForSequenceClassification(config)

    assert verify_on_ranks(classifier, whole_batches=True)[0] is not None


def test_a_masked_model_is_compared_on_the_first_tokens_of_several_long_samples() -> None:
    """Its loss calls `view` on the labels, which does not take columns of a longer tensor."""
    train_on_two_ranks(build("bert", "sdpa", {}), batch(2, 60))


def test_a_preference_is_compared_on_its_answers() -> None:
    """Two samples have the same prompt, on which the gradients of their difference cancel."""
    pair = batch(2, 60)
    pair["input_ids"][1, :40] = pair["input_ids"][0, :40]
    pair["labels"][:, :40] = -100

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("llama", "sdpa", {}).float()
        handle = attach_by(STRICT, model, sp, lambda: attach_model(model, sp))
        WholeBatchHooks(model, handle)

        def loss(part: Any, alone: bool) -> dict[str, Tensor]:
            logits = model(input_ids=part["input_ids"], use_cache=False).logits
            scores = logits[:, :-1].log_softmax(-1)
            chosen, rejected = scores.gather(-1, part["input_ids"][:, 1:, None]).sum((1, 2))
            return {"loss": -nn.functional.logsigmoid(chosen - rejected)}

        handle.compare_first(pair, call=loss)

    run_threads(2, rank)


@pytest.mark.parametrize(
    ("weight", "outcome"),
    [
        (1.0, TRAINS),
        (1.1, pytest.raises(NotImplementedError, match=f"{DIFFERS}: its loss is the first")),
    ],
    ids=["right", "wrong"],
)
def test_a_batch_with_names_of_its_own_is_compared_by_its_loss(
    weight: float, outcome: AbstractContextManager[Any]
) -> None:
    """As TRL's preferences have, with a list of labels. The ranks pad the 27 tokens of two samples:
    rank 1 has as many rows as it would have without padding, and others."""
    preferences = {"completion_ids": batch(3, 27)["input_ids"], "label": [True, False, True]}

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("llama", "sdpa", {}).float()
        handle = attach_by(STRICT, model, sp, lambda: attach_model(model, sp))
        WholeBatchHooks(model, handle)

        def loss(part: Any, alone: bool) -> dict[str, Tensor]:
            ids, wanted = part["completion_ids"], torch.tensor(part["label"])
            scores = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
            answers = scores.gather(-1, ids[:, 1:, None]).mean((1, 2))
            return {"loss": torch.where(wanted, -answers, answers).mean() / (weight, 1)[alone]}

        handle.compare_first(preferences, call=loss)

    with outcome:
        run_threads(2, rank)


def test_images_as_wide_as_the_sequence_are_not_cut_with_it() -> None:
    """Tokens that are padded to 512 beside images of 512 x 512, in small."""
    batch = {"input_ids": torch.arange(64)[None], "pixel_values": torch.ones(1, 3, 64, 64)}
    short = run_threads(2, lambda comm: shorten(batch, sequence_parallel(comm)))[0]
    assert short is not None and short["pixel_values"].shape == (1, 3, 64, 64)


def test_packed_documents_with_masked_prompts_are_compared_from_the_start_of_one() -> None:
    packed = batch(1, 60, position_ids=torch.arange(60)[None] % 30)
    packed["labels"][:, :10] = -100

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("llama", "sdpa", {}).float()
        handle = attach_by(STRICT, model, sp, lambda: attach_model(model, sp))
        WholeBatchHooks(model, handle)
        model(**packed)

    run_threads(2, rank)
