"""What the attention function of transformers cannot honour is refused by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.bert import modeling_bert  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BERT_ASKS_NO_REGISTRY,
    batch,
    build,
    call,
    sequence_parallel,
)
from wf_backends import SequenceParallel  # noqa: E402
from wf_transformers.documents import Documents  # noqa: E402
from wf_transformers.registry import mask_function, register_free  # noqa: E402

IDS = batch(seqlen=8)["input_ids"]
OLD = pytest.mark.skipif(not BERT_ASKS_NO_REGISTRY, reason="this transformers has another door")


def with_model(
    family: str, fn: Callable[[Any], Any], more: dict[str, Any] | None = None, apply: bool = False
) -> None:
    """fn(model) with a model on one rank."""

    def rank(sp: SequenceParallel, name: str) -> None:
        old_bert = family == "bert" and BERT_ASKS_NO_REGISTRY
        model = build(family, "eager" if old_bert else name, more or {})
        if apply:
            wf_transformers.apply(model, sp)
        fn(model)

    call(1, rank)


def refuses(kind: type[Exception], message: str, **words: Any) -> Callable[[Any], None]:
    def fn(model: Any) -> None:
        with pytest.raises(kind, match=message):
            model(**{"input_ids": IDS, "use_cache": False, **words})

    return fn


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(1, 1, 8, 8),  # transformers: full attention, though the layer is causal
        torch.ones(1, 1, 8, 8).tril(-2) * -1e9,
        torch.ones(1, 1, 8, 8).triu(1).bool(),
        torch.tensor([[[[0.0] * 7 + [-1e9]]]]),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_masks_of_four_dims_that_are_no_band(family: str, mask: torch.Tensor) -> None:
    with_model(family, refuses(ValueError, "attention_mask of shape", attention_mask=mask))


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("padding", [[0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]])
def test_local_padding_masks(family: str, padding: list[int]) -> None:
    words = {"attention_mask": torch.tensor([padding])}
    with_model(family, refuses(ValueError, "hides more than causal attention", **words))


def test_local_padding_masks_of_full_attention() -> None:
    def fn(model: Any) -> None:
        with pytest.raises(ValueError, match="hides more than full attention"):
            model(IDS, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]]))

    with_model("bert", fn, apply=True)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_masks_that_say_nothing_are_left_out(family: str) -> None:
    def fn(model: Any) -> None:
        words: dict[str, Any] = {"input_ids": IDS, "use_cache": False}
        plain = model(**words).logits
        for mask in (torch.ones(1, 8), torch.zeros(1, 1, 1, 1)):
            assert torch.equal(model(**words, attention_mask=mask).logits, plain)

    with_model(family, fn)


@pytest.mark.parametrize("apply", (False, True))
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "mistral"])
def test_attention_weights(family: str, apply: bool) -> None:
    words = {"output_attentions": True}
    refused = refuses(NotImplementedError, "output_attentions=True", **words)
    with_model(family, refused, apply=apply)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_attention_weights_under_activation_checkpointing(family: str) -> None:
    def fn(model: Any) -> None:
        model.train().gradient_checkpointing_enable()
        model(IDS, use_cache=False, output_attentions=False).logits.sum().backward()
        with pytest.raises(NotImplementedError, match="output_attentions=True"):
            model(IDS, use_cache=False, output_attentions=True)

    with_model(family, fn)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a_kv_cache(family: str) -> None:
    def fn(model: Any) -> None:
        past = model(IDS, use_cache=True).past_key_values
        message = "1 queries and 9 keys .* KV cache .* generate on one process"
        with pytest.raises(NotImplementedError, match=message):
            model(IDS[:, :1], past_key_values=past, use_cache=True)

    with_model(family, fn)


LAYER = SimpleNamespace(is_causal=True)


@pytest.mark.parametrize(
    ("kind", "message", "layer", "words"),
    [
        (NotImplementedError, "head masks", LAYER, {"head_mask": torch.ones(2)}),
        (NotImplementedError, "an attention bias", LAYER, {"position_bias": torch.ones(2)}),
        (NotImplementedError, "attention weights", LAYER, {"output_attentions": True}),
        (ValueError, "pass cu_seqlens, global", LAYER, {"cu_seq_lens_q": torch.ones(2)}),
        (ValueError, "is_causal must be", SimpleNamespace(is_causal=None), {}),
        (ValueError, r"shape \(1, 4, 4\) is not", LAYER, {"attention_mask": torch.ones(1, 4, 4)}),
        (ValueError, "shape dict is not", LAYER, {"attention_mask": {}}),
        (
            NotImplementedError,
            "a sliding window of 4 without causal",
            SimpleNamespace(is_causal=False),
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
def test_what_other_models_ask_for(
    kind: type[Exception], message: str, layer: Any, words: dict[str, Any]
) -> None:
    def rank(_: SequenceParallel, name: str) -> None:
        q = torch.randn(1, 2, 4, 16)
        with pytest.raises(kind, match=message):
            ALL_ATTENTION_FUNCTIONS[name](layer, q, q, q, **{"attention_mask": None, **words})

    call(1, rank)


def test_mask_functions_of_a_models_own() -> None:
    with pytest.raises(NotImplementedError, match="or_mask_function"):
        mask_function(attention_mask=None, use_vmap=True)


def test_names_that_are_taken() -> None:
    def rank(sp: SequenceParallel, _: str) -> None:
        for name in ("sdpa", "eager", "flash_attention_2"):
            with pytest.raises(ValueError, match=f"'{name}' is taken"):
                wf_transformers.register(sp, name)
        ALL_ATTENTION_FUNCTIONS["somebodys"] = print
        with pytest.raises(ValueError, match="'somebodys' is taken"):
            wf_transformers.register(sp, "somebodys")
        del ALL_ATTENTION_FUNCTIONS["somebodys"]

    call(1, rank)


def test_a_name_of_ours_is_replaced_and_removed() -> None:
    def rank(sp: SequenceParallel, _: str) -> None:
        first = wf_transformers.register(sp)
        second = wf_transformers.register(sp)
        first.remove()
        assert ALL_ATTENTION_FUNCTIONS["wallfacer"] is second.attention
        second.remove()
        second.remove()
        assert "wallfacer" not in ALL_ATTENTION_FUNCTIONS
        with wf_transformers.register(sp, "mine"):
            assert "mine" in ALL_ATTENTION_FUNCTIONS.valid_keys()
        assert "mine" not in ALL_ATTENTION_FUNCTIONS

    call(1, rank)


def test_apply_needs_a_model_that_uses_us() -> None:
    def rank(sp: SequenceParallel, name: str) -> None:
        with pytest.raises(ValueError, match="attn_implementation='sdpa'; call wf_transf"):
            wf_transformers.apply(build("llama", "sdpa", {}), sp)
        other = sequence_parallel(sp.comm)
        with pytest.raises(ValueError, match="registered for another sp"):
            wf_transformers.apply(build("llama", name, {}), other)

    call(1, rank)


@OLD
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"is_decoder": True}, "is_decoder=True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
    ],
)
def test_berts_that_bias_or_decode(more: dict[str, Any], message: str) -> None:
    def rank(sp: SequenceParallel, name: str) -> None:
        with pytest.raises(NotImplementedError, match=message):
            wf_transformers.apply(build("bert", "eager", more), sp)
        with pytest.raises(NotImplementedError, match=message):
            build("bert", name, more)

    call(1, rank)


@OLD
def test_a_name_of_berts_own_registry_is_not_taken() -> None:
    def rank(sp: SequenceParallel, name: str) -> None:
        before = dict(modeling_bert.BERT_SELF_ATTENTION_CLASSES)
        with wf_transformers.register(sp, "another"):
            assert {**before, "another": ANY} == modeling_bert.BERT_SELF_ATTENTION_CLASSES
        assert before == modeling_bert.BERT_SELF_ATTENTION_CLASSES
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(modeling_bert.BERT_SELF_ATTENTION_CLASSES, "theirs", object)
            with pytest.raises(ValueError, match="'theirs' is taken"):
                wf_transformers.register(sp, "theirs")

    call(1, rank)


@OLD
def test_documents_that_would_get_lost_on_the_way() -> None:
    def fn(model: Any) -> None:
        with pytest.raises(ValueError, match="GPT2LMHeadModel .* call wf_transformers.apply"):
            wf_transformers.forward_kwargs(model, {"input_ids": IDS, "cu_seqlens": (0, 3, 8)})

    with_model("gpt2", fn)


@OLD
def test_documents_that_a_recomputed_layer_would_not_find() -> None:
    def fn(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        words = wf_transformers.forward_kwargs(model, {"input_ids": IDS, "cu_seqlens": (0, 3, 8)})
        loss = model(**words).logits.sum()
        with pytest.raises(ValueError, match="checkpoint_kwargs"):
            loss.backward()

    with_model("gpt2", fn, apply=True)


def test_the_scope_of_documents() -> None:
    documents = Documents()
    assert documents.current({}) == {}
    with documents.scope({"cu_seqlens": (0, 4)}):
        _, again = documents.checkpoint_contexts()
        assert documents.current({}) == {"cu_seqlens": (0, 4)}
        assert documents.current({"cu_seqlens": (0, 2, 4)}) == {"cu_seqlens": (0, 2, 4)}
    with pytest.raises(ValueError, match="does not say which documents"):
        documents.current({})
    with documents.scope({}), again:
        assert documents.current({}) == {"cu_seqlens": (0, 4)}
    assert documents.current({"cu_seqlens": None}) == {}


def test_a_failed_forward_leaves_no_documents_behind() -> None:
    def fn(model: Any) -> None:
        with pytest.raises(IndexError):
            model(torch.full((1, 8), 1000), cu_seqlens=(0, 3, 8))
        with pytest.raises(ValueError, match="does not say which documents"):
            model.transformer(IDS, use_cache=False)

    with_model("gpt2", fn, apply=True)


def test_ragged_samples_of_full_attention() -> None:
    local = {"input_ids": torch.ones(2, 8).long(), "attention_mask": torch.ones(2, 8)}

    def fn(model: Any) -> None:
        with pytest.raises(ValueError, match="samples of different lengths"):
            wf_transformers.forward_kwargs(model, local)

    with_model("bert", fn, apply=True)


def test_a_batch_without_tokens() -> None:
    def fn(model: Any) -> None:
        with pytest.raises(ValueError, match=r'"input_ids" \(b, s\), got the keys'):
            wf_transformers.forward_kwargs(model, {"position_ids": IDS})

    with_model("llama", fn)


def test_windows_are_those_of_the_layer() -> None:
    """Qwen2 with a window from its second layer on."""
    more = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    windows = []

    class Recording(SequenceParallel):
        def attention(self, *args: Any, **words: Any) -> torch.Tensor:
            windows.append(words["window_size"])
            return super().attention(*args, **words)

    def rank(sp: SequenceParallel, _: str) -> None:
        recording = Recording(sp.config, sp.comm)
        with wf_transformers.register(recording, "recording"):
            build("qwen2", "recording", more)(IDS, use_cache=False)

    call(1, rank)
    assert windows == [(-1, -1), (2, -1)]


def test_a_layer_that_says_it_has_no_window_has_none() -> None:
    """Whatever its attribute is: EXAONE 4 of transformers 5 does so."""
    layer: Any = torch.nn.Module()
    layer.is_causal, layer.sliding_window = True, 2

    def rank(_: SequenceParallel, name: str) -> None:
        q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64)
        for words, window in ({"sliding_window": None}, 8), ({"sliding_window": 3}, 3), ({}, 2):
            out, _ = ALL_ATTENTION_FUNCTIONS[name](layer, q, k, v, None, **words)
            ahead = torch.arange(8).unsqueeze(1) - torch.arange(8)
            expected = scaled_dot_product_attention(q, k, v, (0 <= ahead) & (ahead < window))
            torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=1e-12)

    call(1, rank)


def on_two_ranks(fn: Callable[[Any, SequenceParallel], None], **more: Any) -> None:
    """fn(model, sp) with a Llama that is attached, on each of two ranks."""

    def rank(sp: SequenceParallel, _: str) -> None:
        model = build("llama", "sdpa", more)
        with wf_transformers.attach(model, sp, verify=False):
            fn(model, sp)

    call(2, rank)


def shard(model: Any, sp: SequenceParallel) -> dict[str, Any]:
    return wf_transformers.forward_kwargs(model, sp.shard_batch({"input_ids": IDS}))


def test_layers_that_are_left_out_at_random_in_training() -> None:
    def fn(model: Any, sp: SequenceParallel) -> None:
        with pytest.raises(NotImplementedError, match="trained with layerdrop=0.1"):
            model(**shard(model, sp))
        model.eval()(**shard(model, sp))

    on_two_ranks(fn, layerdrop=0.1)


def test_a_layer_that_one_rank_leaves_out_is_named_as_the_model_has_it() -> None:
    def fn(model: Any, sp: SequenceParallel) -> None:
        if sp.rank == 1:
            model.model.layers = model.model.layers[1:]
        names = (
            r"layer 'model.layers.0.self_attn' \(ranks \[0\]\), layer 'model.layers.1.self_attn'"
        )
        with pytest.raises(ValueError, match=names):
            model(**shard(model, sp))

    on_two_ranks(fn)


def test_ranks_that_are_threads_take_names_one_after_the_other() -> None:
    def rank(comm: Any) -> list[Any]:
        sp = sequence_parallel(comm)
        return [register_free(sp) for _ in range(50)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        handles = [handle for handles in run_threads(8, rank) for handle in handles]
    finally:
        sys.setswitchinterval(interval)
    assert len({handle.attention.name for handle in handles}) == len(handles)
    for handle in handles:
        handle.remove()
