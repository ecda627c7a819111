"""Text generation with a chunked model: prefill, padding, decoding steps and caches.

The reference is `generate`, or the forward, of the unchunked model.
"""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, T5Config, T5ForConditionalGeneration

from tests.autochunk.graph.models import TOKENS, model_and_inputs
from tests.autochunk.helpers import ANY_SLOWDOWN, relative_error
from wf_backends.autochunk import autochunk


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_generate_runs_its_prefill_in_slices(name: str) -> None:
    """Mistral's window is shorter than the prompt: its cache counts more tokens than it keeps."""
    model, kwargs = model_and_inputs(name, "eager")
    ids, greedy = kwargs["input_ids"], {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY_SLOWDOWN)
    with torch.no_grad():
        assert torch.equal(chunked.generate(ids, **greedy), model.generate(ids, **greedy))
    assert chunked.plan.regions


def test_generate_accepts_padding_on_the_left() -> None:
    """`generate` looks in the forward's signature for masks and positions."""
    model, kwargs = model_and_inputs("llama", "sdpa")
    ids = kwargs["input_ids"].repeat(2, 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, :100] = 0
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY_SLOWDOWN)
    assert inspect.signature(chunked.forward) == inspect.signature(model.forward)
    with torch.no_grad():
        assert torch.equal(chunked.generate(**inputs, **greedy), model.generate(**inputs, **greedy))
    assert chunked.plan.regions


def test_decoding_step_with_a_long_mask_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kwargs = model_and_inputs("llama", "eager")
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY_SLOWDOWN)
    monkeypatch.setattr("wf_backends.autochunk.planning.capture", pytest.fail)
    token, mask = kwargs["input_ids"][:, :1], torch.ones_like(kwargs["input_ids"])
    with torch.no_grad():
        chunked(input_ids=token, attention_mask=mask[:, :1])
        chunked(input_ids=token, attention_mask=mask)


def test_cache_argument_is_filled_as_by_the_model() -> None:
    model, kwargs = model_and_inputs("llama", "eager")
    chunked = autochunk(model, kwargs=kwargs, max_slowdown=ANY_SLOWDOWN)
    cache, expected_cache = DynamicCache(), DynamicCache()
    with torch.no_grad():
        for ids in kwargs["input_ids"].split(TOKENS // 2, dim=1):
            logits = chunked(ids, past_key_values=cache, use_cache=True).logits
            expected = model(ids, past_key_values=expected_cache, use_cache=True).logits
            assert chunked.plan.regions
            torch.testing.assert_close(logits, expected)
            assert cache.get_seq_length() == expected_cache.get_seq_length() > 0
    assert relative_error(cache, expected_cache) < 1e-6


def test_encoder_and_decoder_are_sliced_and_fill_a_passed_cache() -> None:
    """Transformers 5 returns the pair of caches by default; 4 fills the one that is passed."""
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=99)
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.arange(64).view(1, 64)
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    chunked = autochunk(model, kwargs=inputs, max_slowdown=ANY_SLOWDOWN)
    caches = [EncoderDecoderCache(DynamicCache(), DynamicCache()) for _ in range(2)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # as if the model runs unchunked
        for _ in range(2):
            logits = chunked(**inputs, past_key_values=caches[0]).logits
            expected = model(**inputs, past_key_values=caches[1]).logits
            torch.testing.assert_close(logits, expected)
            assert chunked.plan.regions
    assert caches[0].is_updated == caches[1].is_updated == {0: True}
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 128
