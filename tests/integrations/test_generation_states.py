"""Layers with a recurrence or a convolution generate over ranks what one process generates.

Every rank gathers their state after the prompt. transformers has one kind of state since 5.24.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import NoFloat32  # noqa: E402
from tests.integrations.mixer_models import FAMILIES, build  # noqa: E402
from tests.integrations.test_generation import alone, on_ranks, prompts  # noqa: E402
from tests.integrations.transformers_models import VOCAB, sequence_parallel  # noqa: E402
from wf_transformers.families.mixing import mixers_in  # noqa: E402
from wf_transformers.generation.states import has_state  # noqa: E402

KINDS = ("qwen3_next", "nemotron_h", "lfm2")
OPTIONS = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
SHOWN = {"return_dict_in_generate": True, "output_logits": True}


@pytest.fixture(autouse=True)
def _skip_without_states(request: pytest.FixtureRequest) -> None:
    family = request.node.callspec.params["family"]
    layers = mixers_in(build(family)) if family in FAMILIES else []
    if not layers or not all(has_state(x) and not row.has_own_cache for _, x, row in layers):
        pytest.skip(f"this transformers keeps no state of {family} in its cache")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logits_are_those_of_one_process(family: str, size: int):
    expected = alone(build(family).eval(), prompts(), **SHOWN)
    for output in on_ranks(size, lambda: build(family), prompts(), **SHOWN):
        assert torch.equal(output.sequences, expected.sequences)
        for logits, expected_logits in zip(output.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", KINDS)
def test_beams_take_their_states_along(family: str):
    expected = alone(build(family).eval(), prompts(), num_beams=3)
    for tokens in on_ranks(4, lambda: build(family), prompts(), "contiguous", num_beams=3):
        assert torch.equal(tokens, expected)


def talk(family: str, second: Tensor, crop: int = 0) -> list[Any]:
    """What ranks are asked, and answer, after a prompt of 19 tokens and 3 new ones: all that and
    `second`, or `second` alone if `crop` takes back the 21 tokens of the cache."""
    models = [build(family).eval() for _ in range(2)]

    def rank(comm: Any) -> Any:
        model, sp = models[comm.rank], sequence_parallel(comm)
        cache = wf_transformers.ShardedCache(sp)
        with wf_transformers.attach(model, sp, verify=False) as handle, NoFloat32():
            first = wf_transformers.generate(
                model, handle, prompts(), cache, max_new_tokens=3, **OPTIONS
            )
            cache.crop(crop)
            more = torch.cat((first, second), dim=1) if cache.length else second
            options = {**OPTIONS, "max_new_tokens": 4}
            return more, wf_transformers.generate(model, handle, more, cache, **options)

    return run_threads(2, rank)


@pytest.mark.parametrize("crop", [0, -21])
@pytest.mark.parametrize("family", KINDS)
def test_a_conversation_goes_on_from_the_states_or_begins_again(family: str, crop: int):
    second = torch.randint(5, VOCAB, (2, 6), generator=torch.Generator().manual_seed(4))
    for inputs, answer in talk(family, second, crop):
        assert torch.equal(answer, alone(build(family).eval(), inputs, max_new_tokens=4))


@pytest.mark.parametrize("family", KINDS)
def test_tokens_are_not_taken_back_from_a_state(family: str):
    with pytest.raises(ValueError, match=r"crop\(20\): the state of a convolution or recurrence"):
        talk(family, prompts()[:, :2], crop=20)


def padded() -> tuple[Tensor, Tensor]:
    """Three prompts, two of which have padding on the left, and their attention_mask."""
    ids, mask = prompts(3), torch.ones(3, len(prompts()[0]), dtype=torch.int64)
    for sample, start in enumerate((0, 4, 9)):
        ids[sample, :start], mask[sample, :start] = 0, 0
    return ids, mask


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_with_padding_on_the_left_get_the_tokens_of_one_process(family: str):
    ids, mask = padded()
    options: dict[str, Any] = {"attention_mask": mask, **SHOWN}
    expected = alone(build(family).eval(), ids, **options)
    for output in on_ranks(2, lambda: build(family), ids, **options):
        assert torch.equal(output.sequences, expected.sequences)
        for logits, expected_logits in zip(output.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("family", ["mamba2"])
def test_a_bias_at_padding_is_refused(family: str):
    def biased() -> Any:
        model = build(family)
        projection = model.backbone.layers[1].mixer.in_proj
        projection.bias = torch.nn.Parameter(torch.ones(projection.out_features).double())
        return model

    ids, mask = padded()
    with pytest.raises(NotImplementedError, match="Mamba2Mixer adds a bias to padding on the left"):
        on_ranks(2, biased, ids, attention_mask=mask)
