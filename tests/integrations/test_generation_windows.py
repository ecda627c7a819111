"""Models whose layers have windows generate the tokens of one process, with a window of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import FAMILIES, Family, NoFloat32, build  # noqa: E402
from tests.integrations.test_generation import alone, prompts  # noqa: E402
from tests.integrations.transformers_models import LLAMA, sequence_parallel  # noqa: E402
from wf_backends.decode.cache import BLOCK  # noqa: E402

PROMPT, NEW, WINDOW, SLACK = 300, 9, 5, 4
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
SHOWN = {"return_dict_in_generate": True, "output_logits": True}
MISTRAL = Family("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": WINDOW})
FULL = Family("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": None})


@dataclass
class Chat:
    """A rank's model and cache, which goes on with its tokens."""

    model: Any
    handle: Any
    cache: Any

    def generate(self, ids: Tensor, **options: Any) -> Any:
        with NoFloat32():
            all_options = {**OPTIONS, **options}
            return wf_transformers.generate(self.model, self.handle, ids, self.cache, **all_options)

    def rows(self) -> list[float]:
        """Keys of this rank, of one sample, by layer."""
        row = 2 * self.model.config.num_key_value_heads * 8 * 8  # K and V, head_dim, float64
        samples = len(self.cache.starts)
        return [layer.nbytes / (row * samples) for layer in self.cache.by_module.values()]


def chats(size: int, family: Family, talk: Any, layout: str = "zigzag") -> list[Any]:
    """What `talk` returns for the `Chat` of each rank."""
    models: list[nn.Module] = [build(family).eval() for _ in range(size)]

    def rank(comm: Any) -> Any:
        model, sp = models[comm.rank], sequence_parallel(comm, layout)
        with wf_transformers.attach(model, sp, verify=False) as handle:
            return talk(Chat(model, handle, wf_transformers.ShardedCache(sp, SLACK)))

    return run_threads(size, rank)


def assert_same(output: Any, expected: Any) -> None:
    assert torch.equal(output.sequences, expected.sequences)
    for logits, expected_logits in zip(output.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("mode", ["greedy", "beams", "padded"])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "exaone4"])
def test_a_model_of_windows_generates_what_one_process_does(name: str, mode: str, layout: str):
    family, ids, mask = FAMILIES[name], prompts(2, PROMPT), torch.ones(2, PROMPT).long()
    mask[1, :200] = 0
    modes = {"greedy": {}, "beams": {"num_beams": 2}, "padded": {"attention_mask": mask}}
    options = modes[mode] | SHOWN
    expected = alone(build(family, family.reference).eval(), ids, **{**OPTIONS, **options})
    for output in chats(3, family, lambda chat: chat.generate(ids, **options), layout):
        assert_same(output, expected)


def test_windowed_layers_keep_no_more_of_a_longer_prompt():
    def kept(chat: Chat) -> list[float]:
        chat.generate(prompts(2, PROMPT))
        return chat.rows()

    windowed, full = map(sum, zip(*chats(3, FAMILIES["gemma3"], kept), strict=True))
    assert full == PROMPT + NEW - 1
    assert windowed < WINDOW + SLACK + BLOCK


def test_a_prompt_lookup_takes_its_drafts_back():
    ids, options = prompts(1, PROMPT), {"prompt_lookup_num_tokens": SLACK}
    expected = alone(build(MISTRAL, MISTRAL.reference).eval(), ids, **OPTIONS)
    for tokens, rows in chats(
        2, MISTRAL, lambda chat: (chat.generate(ids, **options), chat.rows())
    ):
        assert torch.equal(tokens, expected)
        assert max(rows) < WINDOW + SLACK + BLOCK


def test_a_conversation_goes_back_as_far_as_the_slack_and_on():
    ids = prompts(1, PROMPT)
    model = build(MISTRAL, MISTRAL.reference).eval()
    first = alone(model, ids, **OPTIONS)
    asked = torch.cat((first[:, :-SLACK], ids[:, :30]), dim=1)
    expected = alone(model, asked, **OPTIONS)

    def talk(chat: Chat) -> Tensor:
        chat.generate(ids)
        chat.cache.crop(torch.tensor(first.shape[1] - SLACK))  # as transformers 5.16 passes it
        return chat.generate(asked)

    assert all(torch.equal(tokens, expected) for tokens in chats(2, MISTRAL, talk))


def test_going_back_beyond_the_slack_is_an_error_that_changes_nothing():
    ids = prompts(1, PROMPT)
    more = torch.cat((alone(build(FAMILIES["gemma3"]).eval(), ids, **OPTIONS), ids[:, :5]), 1)

    def talk(chat: Chat) -> tuple[str, Tensor]:
        chat.generate(ids)
        with pytest.raises(ValueError) as error:
            chat.cache.crop(PROMPT - SLACK - BLOCK)
        return str(error.value), chat.generate(more)

    expected = alone(build(FAMILIES["gemma3"]).eval(), more, **OPTIONS)
    for text, tokens in chats(2, FAMILIES["gemma3"], talk):
        assert "a window (4, -1) has dropped the keys before token" in text
        assert torch.equal(tokens, expected)


def test_layers_without_windows_go_back_to_any_token():
    ids = prompts(1, PROMPT)
    expected = alone(build(FULL).eval(), ids[:, :20], **OPTIONS)

    def talk(chat: Chat) -> Tensor:
        chat.generate(ids)
        chat.cache.crop(19)
        return chat.generate(ids[:, :20])

    assert all(torch.equal(tokens, expected) for tokens in chats(2, FULL, talk))


@pytest.mark.parametrize(
    ("samples", "hidden", "message"),
    [
        (1, (), "1 samples for a cache of 2"),
        (2, (0, 1), r"hides \[2, 0\] tokens on the left of the samples, and .* \[0, 0\] hidden"),
        (2, (PROMPT + NEW - 2, PROMPT + NEW - 1), "hides more than padding on the left"),
    ],
    ids=["samples", "padding", "hole"],
)
def test_other_samples_or_padding_than_those_of_the_cache_are_refused(
    samples: int, hidden: tuple[int, ...], message: str
):
    def talk(chat: Chat) -> str:
        tokens = torch.cat((chat.generate(prompts(2, PROMPT)), prompts(2, 5)), 1)[:samples]
        mask = torch.ones_like(tokens)
        mask[0, list(hidden)] = 0
        with pytest.raises((ValueError, NotImplementedError), match=message):
            chat.generate(tokens, attention_mask=mask)
        return "refused"

    assert chats(2, FULL, talk) == ["refused"] * 2


def test_inputs_no_longer_than_the_cache_are_refused():
    def talk(chat: Chat) -> str:
        tokens = chat.generate(prompts(1, PROMPT))
        with pytest.raises(ValueError) as error:
            chat.generate(tokens[:, :-1])
        return str(error.value)

    for text in chats(2, FULL, talk):
        assert f"inputs have {PROMPT + NEW - 1} tokens, and the cache {PROMPT + NEW - 1}" in text
        assert f"cache.crop({PROMPT + NEW - 2})" in text
