"""Prompts with images and videos generate the tokens of one process, over ranks that share them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import NoFloat32  # noqa: E402
from tests.integrations.media_batches import (  # noqa: E402
    GRIDS,
    IMAGE,
    VIDEO,
    llava_batch,
    num_patches,
    qwen_batch,
)
from tests.integrations.media_models import MODELS, build, media_batch  # noqa: E402
from tests.integrations.transformers_models import sequence_parallel  # noqa: E402
from wf_transformers.generation.media import _after_media  # noqa: E402

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
SHOWN = {"return_dict_in_generate": True, "output_logits": True}
PADDING = 5
WITHOUT = {"paligemma", "llama4"}  # a prompt that is a prefix; layers with chunks
WITHOUT |= {
    "glm5_next",
    "mistral_large4",
    "minimax_m3",
    "dots3",
    "hy_v4_vl",
}  # their layers have an indexer
if not hasattr(transformers, "Qwen3VLConfig"):  # its Qwen2-Audio takes no cache over ranks
    WITHOUT.add("qwen2_audio")


def prompt_of(family: str, padded: bool = False) -> dict[str, Any]:
    """Two samples of 3 and 1 images, and a video for families that take any."""
    batch = media_batch(family, video=True)
    del batch["labels"]
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return _padded_on_the_left(batch) if padded else batch


def _padded_on_the_left(batch: dict[str, Any]) -> dict[str, Any]:
    """The second sample has padding, and the first as much more text."""
    first = torch.tensor([[11] * PADDING, [0] * PADDING])
    fill = {
        "input_ids": first,
        "attention_mask": (first > 0).long(),
        "mm_token_type_ids": 0 * first,
        "token_type_ids": 0 * first,
    }
    return batch | {
        k: torch.cat((x.to(batch[k].dtype), batch[k]), 1) for k, x in fill.items() if k in batch
    }


def alone(family: str, prompt: dict[str, Any], **options: Any) -> Any:
    model = build(family).eval()
    with NoFloat32():
        return model.generate(**prompt, **{**OPTIONS, **options})


def on_ranks(size: int, family: str, talk: Any, layout: str = "zigzag") -> list[Any]:
    """What `talk(model, generate, cache)` returns on each rank."""
    models = [build(family).eval() for _ in range(size)]

    def rank(comm: Any) -> Any:
        model, sp = models[comm.rank], sequence_parallel(comm, layout)
        cache = wf_transformers.ShardedCache(sp)

        def generate(prompt: dict[str, Any], **options: Any) -> Any:
            others = {k: x for k, x in prompt.items() if k != "input_ids"}
            ids, all_options = prompt["input_ids"], {**OPTIONS, **others, **options}
            return wf_transformers.generate(model, handle, ids, cache, **all_options)

        with wf_transformers.attach(model, sp, verify=False) as handle, NoFloat32():
            return talk(model, generate, cache)

    return run_threads(size, rank)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(("size", "layout"), [(2, "zigzag"), (4, "contiguous")])
@pytest.mark.parametrize("family", sorted(MODELS.keys() - WITHOUT))
def test_images_and_videos_give_the_logits_of_one_process(
    family: str, size: int, layout: str, padded: bool
):
    prompt = prompt_of(family, padded)
    expected = alone(family, prompt, **SHOWN)
    for output in on_ranks(size, family, lambda _, go, __: go(prompt, **SHOWN), layout):
        assert torch.equal(output.sequences, expected.sequences)
        for logits, expected_logits in zip(output.logits, expected.logits, strict=True):
            torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "family", sorted({"qwen2_vl", "qwen2_5_vl", "llava", "qwen3_5"} & MODELS.keys())
)
def test_beams_share_the_images_of_their_sample(family: str):
    prompt = prompt_of(family)
    if family == "llava":  # transformers 4 gives beams wrong images where a sample has several
        prompt = {k: x for k, x in llava_batch((1, 1)).items() if k != "labels"}
    expected = alone(family, prompt, num_beams=3)
    for tokens in on_ranks(2, family, lambda _, go, __: go(prompt, num_beams=3)):
        assert torch.equal(tokens, expected)


def test_a_rank_encodes_only_the_images_that_it_has_tokens_of():
    """Rank 0 has the first image of each sample, and rank 1 the other two."""
    prompt = {k: x for k, x in qwen_batch().items() if k != "labels"}

    def encoded(model: Any, generate: Any, _: Any) -> int:
        rows = list[int]()
        visual = model.get_submodule("visual" if hasattr(model, "visual") else "model.visual")
        visual.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
        generate(prompt)
        return sum(rows)

    first, second, third, of_sample_2 = map(num_patches, GRIDS)
    counts = on_ranks(2, "qwen2_vl", encoded, "contiguous")
    assert counts == [first + of_sample_2, second + third]


def asked(prompt: dict[str, Any], tokens: Tensor) -> dict[str, Any]:
    """The images of the prompt with other text after them."""
    types = {"mm_token_type_ids": (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()}
    types = {name: x for name, x in types.items() if name in prompt}
    return prompt | types | {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "qwen3_vl"])
def test_other_questions_about_the_same_images_take_the_cache(family: str):
    if family not in MODELS:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    prompt = prompt_of(family)
    ids, question = prompt["input_ids"], torch.full((2, 4), 13)
    first = alone(family, prompt)
    chats = [torch.cat((first, question), 1), torch.cat((ids[:, :-2], question), 1)]
    expected = [alone(family, asked(prompt, tokens)) for tokens in chats]

    def talk(_: Any, generate: Any, cache: Any) -> list[Tensor]:
        more = torch.cat((generate(prompt), question), 1)
        outputs = [generate({"input_ids": more})]
        cache.crop(ids.shape[1] - 2)
        return [*outputs, generate({"input_ids": torch.cat((ids[:, :-2], question), 1)})]

    for outputs in on_ranks(2, family, talk):
        for tokens, expected_tokens in zip(outputs, expected, strict=True):
            assert torch.equal(tokens, expected_tokens)


def test_a_model_of_images_takes_prompts_of_text():
    prompt = {"input_ids": torch.arange(3, 40).expand(2, -1)}
    prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    expected = alone("qwen2_5_vl", prompt)
    for tokens in on_ranks(3, "qwen2_5_vl", lambda _, go, __: go(prompt)):
        assert torch.equal(tokens, expected)


@pytest.mark.skipif(not hasattr(transformers, "Qwen3VLConfig"), reason="4.51 has no registry here")
def test_gemma_3_with_an_encoder_takes_prompts_of_text():
    prompt = {"input_ids": torch.arange(3, 40).expand(2, -1)}
    expected = alone("gemma3", prompt)
    for tokens in on_ranks(2, "gemma3", lambda _, go, __: go(prompt)):
        assert torch.equal(tokens, expected)


def test_a_cache_is_not_cropped_inside_of_images():
    def talk(_: Any, generate: Any, cache: Any) -> str:
        generate(prompt_of("qwen2_vl"))
        with pytest.raises(ValueError) as error:
            cache.crop(6)
        return str(error.value)

    assert all("images and videos end before token" in x for x in on_ranks(2, "qwen2_vl", talk))


def test_images_after_the_prompt_are_refused():
    prompt = prompt_of("llava")

    def talk(_: Any, generate: Any, __: Any) -> str:
        tokens = generate(prompt)
        more = torch.cat((tokens, prompt["input_ids"]), 1)
        with pytest.raises(NotImplementedError) as error:
            generate({"input_ids": more, "pixel_values": prompt["pixel_values"]})
        return str(error.value)

    assert all("belong to the prompt of a new cache" in x for x in on_ranks(2, "llava", talk))


def test_tokens_after_media_go_on_from_the_last_position() -> None:
    """Not from the largest one, which may be a medium's."""
    positions = torch.tensor([[[0, 9, 9, 3, 4]], [[0, 1, 2, 3, 4]], [[0, 2, 1, 3, 4]]])
    behind, first_text = _after_media(positions)
    assert behind.tolist() == [0] and first_text == 3
