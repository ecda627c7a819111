"""Generation with a cache on several ranks gives the tokens and logits of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import (  # noqa: E402
    FAMILIES,
    NOT_GENERATING,
    Family,
    NoFloat32,
    build,
)
from tests.integrations.transformers_models import (  # noqa: E402
    HEADS,
    LLAMA,
    SMALL,
    VOCAB,
    sequence_parallel,
)

PROMPT, NEW = 19, 7
DECODERS = [
    name for name, family in FAMILIES.items() if not family.masked_lm and name not in NOT_GENERATING
]
OF_OLD_CACHES = ("gptj", "codegen", "gpt_neo", "mpt")
"""Families whose models in transformers 4.51 keep tuples of keys and values."""
MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "penalty": {"repetition_penalty": 1.3, "min_new_tokens": 3},
}


def prompts(batch: int = 2, length: int = PROMPT) -> Tensor:
    """Random tokens; the second half repeats the first, so that a lookup finds something."""
    ids = torch.randint(5, VOCAB, (batch, length), generator=torch.Generator().manual_seed(3))
    ids[:, length - length // 2 :] = ids[:, : length // 2]
    return ids


def alone(model: Any, ids: Tensor, **options: Any) -> Any:
    """What transformers generates on one process."""
    with NoFloat32():
        return model.generate(ids, **_options(**options))


def _options(**options: Any) -> dict[str, Any]:
    defaults = {
        "max_new_tokens": NEW,
        "use_cache": True,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    return {**defaults, "cache_implementation": None, **options}


def on_ranks(
    size: int, make: Callable[[], Any], ids: Tensor, layout: str = "zigzag", **options: Any
) -> list[Any]:
    """What `wf_transformers.generate` generates on each rank."""
    models = [make().eval() for _ in range(size)]
    options = _options(**options)
    del options["cache_implementation"]

    def rank(comm: Any) -> Any:
        model, sp = models[comm.rank], sequence_parallel(comm, layout)
        with wf_transformers.attach(model, sp, verify=False) as handle, NoFloat32():
            return wf_transformers.generate(model, handle, ids, **options)

    return run_threads(size, rank)


def llama() -> nn.Module:
    return build(Family("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "num_key_value_heads": 2}))


def _skip_without_cache(name: str) -> None:
    model_class = getattr(transformers, FAMILIES[name].model, None)
    if model_class is None or not getattr(model_class, "_supports_cache_class", True):
        pytest.skip(f"{name} has no cache object in transformers {transformers.__version__}")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", DECODERS)
def test_tokens_and_logits_of_a_family_are_those_of_one_process(name: str, size: int):
    _skip_without_cache(name)
    family, shown = FAMILIES[name], {"return_dict_in_generate": True, "output_logits": True}
    expected = alone(build(family, family.reference).eval(), prompts(), **shown)
    for output in on_ranks(size, lambda: build(family), prompts(), **shown):
        assert torch.equal(output.sequences, expected.sequences)
        for logits, expected_logits in zip(output.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3", "opt", "bloom", "gpt_oss", "mixtral"])
def test_samples_with_padding_on_the_left_get_the_tokens_of_one_process(name: str, beams: int):
    family = Family("LlamaForCausalLM", "LlamaConfig", LLAMA)
    if name in FAMILIES:
        _skip_without_cache(name)
        family = FAMILIES[name]
    ids, mask = prompts(3), torch.ones(3, PROMPT, dtype=torch.int64)
    for sample, start in enumerate((0, 4, 9)):
        ids[sample, :start], mask[sample, :start] = 0, 0
    options = {"attention_mask": mask, "num_beams": beams}
    expected = alone(build(family, family.reference).eval(), ids, **options)
    for tokens in on_ranks(3, lambda: build(family), ids, **options):
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("mode", MODES)
def test_every_way_of_decoding_gives_the_tokens_of_one_process(mode: str, layout: str):
    ids = prompts(1 if mode == "lookup" else 2)
    expected = alone(llama().eval(), ids, **MODES[mode])
    for tokens in on_ranks(4, llama, ids, layout, **MODES[mode]):
        assert torch.equal(tokens, expected)


def sampled(comm: Any, models: list[Any], seeds: list[int]) -> Any:
    """Tokens of a rank that is seeded by itself; ranks are threads, so only one may draw."""
    model, sp = models[comm.rank], sequence_parallel(comm)
    drawn = torch.Generator().manual_seed(seeds[comm.rank])

    class Draw(transformers.LogitsProcessor):
        """Leaves one token that this rank draws."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            token = torch.multinomial(scores.softmax(-1), 1, generator=drawn)
            return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)

    processors = transformers.LogitsProcessorList([Draw()])
    options = {**_options(), "logits_processor": processors}
    del options["cache_implementation"]
    with wf_transformers.attach(model, sp, verify=False) as handle:
        try:
            return wf_transformers.generate(model, handle, prompts(), **options)
        except ValueError as error:
            return f"{error} {error.__notes__}"


def test_ranks_that_are_seeded_alike_draw_the_same_tokens():
    first, second = run_threads(2, sampled, [llama().eval() for _ in range(2)], [5, 5])
    assert torch.equal(first, second)


def test_ranks_that_draw_other_tokens_are_stopped():
    for text in run_threads(2, sampled, [llama().eval() for _ in range(2)], [5, 6]):
        assert "the ranks do not agree" in text and "seeded alike" in text


def test_a_conversation_continues_with_its_cache():
    more = prompts(2, 5)
    model = llama().eval()
    first = alone(model, prompts())
    expected = alone(model, torch.cat((first, more), 1))
    models = [llama().eval() for _ in range(3)]

    def rank(comm: Any) -> tuple[Tensor, int]:
        model, sp = models[comm.rank], sequence_parallel(comm)
        options = _options()
        del options["cache_implementation"]
        with wf_transformers.attach(model, sp, verify=False) as handle, NoFloat32():
            cache = wf_transformers.ShardedCache(sp)
            tokens = wf_transformers.generate(model, handle, prompts(), cache, **options)
            tokens = torch.cat((tokens, more), 1)
            return wf_transformers.generate(model, handle, tokens, cache, **options), cache.nbytes

    results = run_threads(3, rank)
    assert all(torch.equal(tokens, expected) for tokens, _ in results)
    cached = expected.shape[1] - 1
    row = 2 * 2 * 2 * model.config.head_dim * 2 * 8  # layers, samples, heads, K and V, float64
    assert sum(nbytes for _, nbytes in results) == cached * row


def test_the_model_is_as_before_afterwards():
    model = llama().eval()
    expected = alone(model, prompts())
    with wf_transformers.attach(model, sequence_parallel(_one_rank()), verify=False) as handle:
        wf_transformers.generate(model, handle, prompts(), max_new_tokens=2)
    assert torch.equal(alone(model, prompts()), expected)


def _one_rank() -> Any:
    from wf_backends.comm import World

    return World(1).comm(0)


def refusal(make: Callable[[], Any], ids: Tensor, **options: Any) -> str:
    with pytest.raises((ValueError, NotImplementedError)) as error:
        on_ranks(1, make, ids, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_time": 1.0}, "ranks would stop at different tokens"),
        ({"use_cache": False}, "generation over ranks needs its cache"),
        ({"past_key_values": ()}, "a ShardedCache"),
        ({"pixel_values": 1}, "LlamaForCausalLM with pixel_values: generation over ranks takes"),
        ({"guidance_scale": 1.5}, "it runs a second prompt"),
        ({"assistant_early_exit": 1}, "its drafts leave out layers"),
        ({"prefill_chunk_size": 8}, "cut over the ranks, not over time"),
        ({"penalty_alpha": 0.6}, "contrastive search needs the hidden states"),
        ({"position_ids": 1}, "they follow from attention_mask and images"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"attention_mask": torch.tensor([[1] * (PROMPT - 1) + [0]] * 2)}, "padding on the left"),
        ({"attention_mask": torch.tensor([[1] * PROMPT, [0] * PROMPT])}, f"[{PROMPT}, 0]: leave"),
        ({"attention_mask": torch.ones(2, 5).triu()}, f"attention_mask must be (2, {PROMPT})"),
    ],
)
def test_options_that_ranks_cannot_follow_are_refused(options: dict[str, Any], message: str):
    assert message in refusal(llama, prompts(), **options)


@pytest.mark.parametrize("inputs", [prompts()[0], {"input_ids": prompts()}], ids=["1d", "dict"])
def test_inputs_that_are_no_samples_of_ids_are_refused(inputs: Any):
    assert "inputs must be ids (b, S), got" in refusal(llama, inputs)


@pytest.mark.parametrize("own", [{}, {"generation_config": transformers.GenerationConfig()}])
def test_options_of_a_checkpoint_that_ranks_cannot_follow_are_refused(own: dict[str, Any]):
    model = llama().eval()
    model.generation_config.max_time = 9.0
    assert "max_time=9.0: ranks would stop" in refusal(lambda: model, prompts(), **own)
    on_ranks(1, lambda: model, prompts(), max_time=None, **own)  # taken back


def test_a_second_prompt_of_the_same_model_is_refused():
    """As classifier-free guidance runs one, whose tokens must not enter the cache."""
    model = llama().eval()

    def unconditional(ids: Tensor, scores: Tensor) -> Tensor:
        return scores - model(ids[:, -1:], position_ids=ids[:, -1:] * 0).logits[:, -1]

    text = refusal(lambda: model, prompts(), logits_processor=[unconditional])
    assert "called with another cache while it generates" in text


def test_a_recurrence_whose_state_is_not_in_the_cache_is_refused():
    def griffin() -> nn.Module:
        config = transformers.RecurrentGemmaConfig(**SMALL, **HEADS, lru_width=32)
        return transformers.RecurrentGemmaForCausalLM(config)

    assert "recurrences whose states transformers' cache keeps" in refusal(griffin, prompts())


def test_an_indexer_is_refused_before_the_padding_of_its_samples():
    """Whose borders it would take for wrong ones."""
    mask = torch.ones(2, PROMPT).long()
    mask[1, :4] = 0
    text = refusal(lambda: build(FAMILIES["deepseek_v32"]), prompts(), attention_mask=mask)
    assert "chooses its keys by an indexer, beside generation" in text


def test_a_layer_that_is_called_twice_is_refused():
    def shared() -> Any:
        model: Any = llama()
        model.model.layers[1] = model.model.layers[0]
        return model

    assert "a layer that is called twice" in refusal(shared, prompts())


def test_a_model_in_training_mode_is_refused():
    model = llama().train()
    sp = sequence_parallel(_one_rank())
    with wf_transformers.attach(model, sp, verify=False) as handle:
        with pytest.raises(ValueError, match="call model.eval"):
            wf_transformers.generate(model, handle, prompts())


def test_a_model_that_takes_whole_batches_is_refused():
    model = llama().eval()
    sp = sequence_parallel(_one_rank())
    with wf_transformers.attach(model, sp, verify=False) as handle:
        wf_transformers.WholeBatchHooks(model, handle)
        with pytest.raises(ValueError, match="takes whole batches"):
            wf_transformers.generate(model, handle, prompts())
