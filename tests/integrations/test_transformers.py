"""Models of transformers on ranks give what they give on one device: logits, loss, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

import wf_transformers  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    DECODERS,
    FAMILIES,
    Job,
    assert_close,
    assert_equal,
    batch,
    build,
    call,
    one_device,
)
from wf_backends.parallel.loss import count_valid  # noqa: E402
from wf_transformers.batch import LAYERS_KEEP_KEYWORDS  # noqa: E402

DOCUMENTS = (0, 5, 16, 23)
KEYWORD_MODELS = ["llama", "qwen2", "qwen3", "mistral", "gpt_neox"]
CARRIES_KEYWORDS = FAMILIES if LAYERS_KEEP_KEYWORDS else KEYWORD_MODELS


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", DECODERS)
def test_decoders(family: str, size: int) -> None:
    assert_equal(Job(family, size, apply=family == "gpt2"), batch(2))


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_contiguous(family: str) -> None:
    assert_equal(Job(family, 2, layout="contiguous"), batch(seqlen=24))


@pytest.mark.parametrize(("layout", "size"), [("zigzag", 4), ("contiguous", 2)])
@pytest.mark.parametrize("family", DECODERS)
def test_packed_documents(family: str, layout: str, size: int) -> None:
    assert_equal(Job(family, size, layout, apply=True), batch(cu_seqlens=DOCUMENTS))


@pytest.mark.parametrize("family", CARRIES_KEYWORDS)
def test_packed_documents_by_keyword_alone(family: str) -> None:
    assert_equal(Job(family, checkpoint=LAYERS_KEEP_KEYWORDS), batch(cu_seqlens=DOCUMENTS))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_keywords_survive_any_checkpointing(family: str) -> None:
    job = Job(family, apply=True, checkpoint=True, plain_checkpoint=True)
    assert_equal(job, batch(cu_seqlens=DOCUMENTS))


@pytest.mark.parametrize("family", [*DECODERS, "bert"])
def test_gradient_checkpointing_finds_its_documents(family: str) -> None:
    assert_equal(Job(family, checkpoint=True, apply=True), batch(cu_seqlens=DOCUMENTS))


@pytest.mark.parametrize("window", [1, 2, 3, 40])
def test_sliding_windows_of_any_size(window: int) -> None:
    assert_equal(Job("mistral", 4, more={"sliding_window": window}), batch())


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("first", [0, 1] if LAYERS_KEEP_KEYWORDS else [0])
def test_windows_from_some_layer_on(family: str, first: int) -> None:
    """The reference of transformers 4 gives all layers a window, so there all have one here."""
    more = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": first}
    assert_equal(Job(family, 4, more=more), batch(2))


@pytest.mark.parametrize(
    "more", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}]
)
def test_gpt2_scales_as_its_config_says(more: dict[str, Any]) -> None:
    """Against the eager attention: transformers' own sdpa ignores these options."""
    given = batch(seqlen=24)
    state = build("gpt2", "eager", more).state_dict()
    wanted = build("gpt2", "eager", more, state)(given["input_ids"]).logits
    local = {"input_ids": given["input_ids"]}

    def rank(sp: Any, name: str) -> torch.Tensor:
        model = build("gpt2", name, more, state)
        kwargs = wf_transformers.forward_kwargs(model, sp.shard_batch(local))
        return sp.unshard(model(**kwargs).logits.detach())[:, : wanted.shape[1]]

    assert_close(call(2, rank)[0], wanted, "logits")


def test_right_padding_of_ragged_samples() -> None:
    mask = (torch.arange(23)[None] < torch.tensor([[23], [9]])).long()
    assert_equal(Job("llama", 4), batch(2, attention_mask=mask), mask.bool())


def test_right_padding_is_a_document_of_full_attention() -> None:
    mask = (torch.arange(23)[None] < 17).long()
    assert_equal(Job("bert", 2, apply=True), batch(attention_mask=mask), mask.bool())


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_bert(size: int, documents: tuple[int, ...] | None) -> None:
    assert_equal(Job("bert", size, apply=True), batch(cu_seqlens=documents))


@pytest.mark.parametrize("apply", [False, True])
def test_bert_built_with_the_registered_name(apply: bool) -> None:
    given = batch(cu_seqlens=DOCUMENTS) if apply else batch(seqlen=24)
    assert_equal(Job("bert", 2, apply=apply, old_bert=""), given)


def test_bert_built_with_sdpa() -> None:
    assert_equal(Job("bert", apply=True, old_bert="sdpa"), batch(cu_seqlens=DOCUMENTS))


@pytest.mark.parametrize("family", DECODERS)
def test_the_loss_of_the_model_itself_is_this_ranks_share(family: str) -> None:
    given = batch(2, seqlen=24)
    state, _, loss, _ = one_device(Job(family), given)

    def rank(sp: Any, name: str) -> torch.Tensor:
        model = build(family, name, {}, state)
        local = sp.shard_batch(given)
        num_valid = sp.sum_over_ranks(count_valid(local["labels"]))
        kwargs = wf_transformers.forward_kwargs(model, local, num_valid=num_valid)
        ours, theirs = sp.loss(model(**kwargs).logits, local["labels"]), model(**kwargs).loss
        torch.testing.assert_close(theirs.double(), ours, rtol=1e-6, atol=0)
        return ours.detach()

    assert_close(sum(call(2, rank)), loss, "loss")


@pytest.mark.parametrize("family", DECODERS)
def test_masks_that_the_model_builds_from_local_rows_are_recognised(family: str) -> None:
    """A plain call without forward_kwargs: transformers 4 then builds a mask of local rows."""
    given = batch(seqlen=24)
    _, logits, _, _ = one_device(Job(family), given)
    state = build(family, "sdpa", {}).state_dict()

    def rank(sp: Any, name: str) -> torch.Tensor:
        model = build(family, name, {}, state)
        local = sp.shard_batch(given)
        out = model(input_ids=local["input_ids"], position_ids=local["position_ids"])
        return sp.unshard(out.logits.detach())

    assert_close(call(2, rank)[0], logits, "logits")


@pytest.mark.parametrize("family", DECODERS)
def test_no_mask_of_local_rows_is_built(family: str) -> None:
    def rank(sp: Any, name: str) -> list[tuple[int, ...]]:
        ours, shapes = ALL_ATTENTION_FUNCTIONS[name], []

        def spy(module: Any, q: Any, k: Any, v: Any, mask: Any, **words: Any) -> Any:
            shapes.append(mask.shape)
            return ours(module, q, k, v, mask, **words)

        model = build(family, name, {})
        ALL_ATTENTION_FUNCTIONS[name] = spy
        model(**wf_transformers.forward_kwargs(model, sp.shard_batch(batch(3, seqlen=24))))
        ALL_ATTENTION_FUNCTIONS[name] = ours
        return shapes

    assert call(2, rank) == [[(3, 1, 1, 1)] * 2] * 2


def test_an_application_can_be_undone() -> None:
    given = batch(seqlen=24)
    state, logits, _, _ = one_device(Job("bert"), given)

    def rank(sp: Any, name: str) -> None:
        asked = ALL_ATTENTION_FUNCTIONS[name]
        model = build("bert", "eager", {}, state)
        before = [type(module) for module in model.modules()]
        try:
            wf_transformers.apply(model, sp).remove()
        except ValueError:  # this BERT asks the registry
            return
        assert [type(module) for module in model.modules()] == before
        assert ALL_ATTENTION_FUNCTIONS[name] is asked
        assert_close(model(given["input_ids"]).logits, logits, "logits")

    call(1, rank)
