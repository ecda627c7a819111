"""Models that take images and videos among tokens are exact on ranks.

Each rank encodes the media that it has tokens of. The reference is the same model on one device, in
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers as tf  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.families import copy_and_spoil  # noqa: E402
from tests.integrations.media_batches import (  # noqa: E402
    GRIDS,
    IMAGE,
    images_of_one_tile_batch,
    llava_batch,
    num_patches,
    qwen_batch,
    right_padded,
    sound_of_video_batch,
)
from tests.integrations.media_models import (  # noqa: E402
    MODELS,
    TEXT_ALONE,
    build,
    media_batch,
)
from tests.integrations.media_ranks import on_ranks, without_labels  # noqa: E402
from tests.integrations.results import (  # noqa: E402
    Result,
    assert_means_are,
    assert_shares_sum_to,
    run_on_shard,
    run_whole_batch,
    with_token_loss,
)
from tests.integrations.transformers_models import sequence_parallel, stay_in_float64  # noqa: E402
from wf_transformers import ModelOptions, WholeBatchHooks  # noqa: E402
from wf_transformers.families.media_counts import merging_model  # noqa: E402
from wf_transformers.families.media_features import MASK_OF_TYPES  # noqa: E402
from wf_transformers.families.media_table import media_modules  # noqa: E402
from wf_transformers.models import file_of  # noqa: E402

HAS_INNER = hasattr(tf, "LlavaOnevisionModel")  # since 4.52
TYPE_OF_TEXT = {"gemma3": 0, "paligemma": 1}


@pytest.fixture(autouse=True)
def all_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_float64(monkeypatch)


def run_on_one_device(family: str, inputs: dict[str, Any]) -> Result:
    model, mask = build(family), {}
    if family.startswith(("glm", "qwen3_vl")):  # else some releases take images for documents
        mask = {"attention_mask": torch.ones_like(inputs["input_ids"])}
    logits = model(**mask | without_labels(inputs), use_cache=False).logits
    return with_token_loss(model, logits, inputs)


def assert_exact(
    family: str,
    size: int,
    inputs: dict[str, Any],
    layout: str = "zigzag",
    change_attached: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> list[int]:
    """On `size` ranks. Returns how many images (LLaVA) or patches (Qwen) each rank encoded.

    The ranks call the modules that see media equally often: ZeRO 3 and FSDP gather at each call.
    """
    expected = run_on_one_device(family, inputs)

    def rank(comm: Any) -> tuple[Result, int, list[str]]:
        sp, model, calls = sequence_parallel(comm, layout), build(family), list[str]()
        wf_transformers.attach_model(model, sp)
        model = change_attached(model)
        for name, module in model.named_modules():
            if not media_modules(model).isdisjoint(name.split(".")):
                module.register_forward_hook(lambda *_, name=name: calls.append(name))
        local = wf_transformers.shard_media(model, sp, inputs)
        return run_on_shard(model, sp, local), len(local.get("pixel_values", ())), calls

    results, encoded, calls = zip(*run_threads(size, rank), strict=True)
    assert_shares_sum_to(expected, results)
    assert all(of_rank == calls[0] for of_rank in calls)
    return list(encoded)


@pytest.mark.parametrize(("size", "layout"), [(1, "zigzag"), (2, "contiguous"), (4, "zigzag")])
@pytest.mark.parametrize("family", MODELS)
def test_images_are_exact(family: str, size: int, layout: str) -> None:
    assert_exact(family, size, media_batch(family), layout)


@pytest.mark.parametrize("family", sorted({"qwen2_vl", "qwen2_5_vl", "minimax_m3"} & MODELS.keys()))
def test_images_and_a_video_are_exact(family: str) -> None:
    assert_exact(family, 4, qwen_batch(video=True))


@pytest.mark.skipif("qwen2_5_omni" not in MODELS, reason="transformers 4.51 has no Omni")
@pytest.mark.parametrize(
    ("family", "frames", "tokens"), [("qwen2_5_omni", 16, 4), ("qwen3_omni", 112, 15)]
)
@pytest.mark.parametrize("masked", [True, False])
def test_the_sound_of_a_video_is_exact(family: str, frames: int, tokens: int, masked: bool) -> None:
    """Without attention_mask, positions are those of text, as on one device."""
    assert_exact(family, 4, sound_of_video_batch(frames, tokens, masked))


@pytest.mark.skipif(not HAS_INNER, reason="transformers 4 cuts every image into tiles")
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_several_images_of_one_tile_in_a_sample_are_exact(layout: str) -> None:
    """A rank that has one of them encodes another one, too."""
    encoded = assert_exact("llava_onevision", 4, images_of_one_tile_batch(), layout)
    assert 1 not in encoded[:2]


@pytest.mark.parametrize("family", ["llava", "idefics3", "gemma3"])
def test_packed_documents_with_images_are_exact(family: str) -> None:
    """The borders of two documents, of one and two images, are inside of a rank's tokens."""
    inputs = {k: x[:1] for k, x in media_batch(family).items() if k != "pixel_attention_mask"}
    pixels, borders = llava_batch()["pixel_values"][:3], (0, 8, 23)
    assert inputs["input_ids"].shape[1] == borders[-1]

    def of_images(x: Any) -> Any:
        return x[None] if family == "idefics3" else x

    model, logits = build(family), []
    for start, stop, images in [(0, 8, pixels[:1]), (8, 23, pixels[1:])]:
        tokens = {k: x[:, start:stop] for k, x in inputs.items() if k.endswith("ids")}
        logits += [model(**tokens, pixel_values=of_images(images), use_cache=False).logits]
    inputs |= {"pixel_values": of_images(pixels), "cu_seqlens": borders}
    expected = with_token_loss(model, torch.cat(logits, dim=1), inputs)

    def rank(model: Any, sp: Any) -> Result:
        return run_on_shard(model, sp, wf_transformers.shard_media(model, sp, inputs))

    assert_shares_sum_to(expected, on_ranks(family, rank, 4))


@pytest.mark.parametrize("family", [*MODELS, *TEXT_ALONE])
def test_text_alone_is_exact(family: str) -> None:
    ids = qwen_batch()["input_ids"].clamp(max=9)  # no token of an image
    inputs = {"input_ids": ids, "labels": ids}
    if family == "llama4":  # it needs one
        inputs["attention_mask"] = torch.ones_like(ids)
    if hasattr(file_of(merging_model(build(family))), MASK_OF_TYPES):  # it needs types in training
        inputs["token_type_ids"] = torch.full_like(ids, TYPE_OF_TEXT[family])
    assert_exact(family, 2, inputs)


@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "gemma3", "qwen2_audio", "smolvlm"])
def test_deep_copy_of_an_attached_model_is_exact(family: str) -> None:
    assert_exact(family, 2, media_batch(family), change_attached=copy_and_spoil)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", MODELS)
def test_whole_batches_are_exact(family: str, size: int) -> None:
    """As the Trainer and accelerate call a model: the whole batch on every rank, and its loss."""
    inputs = media_batch(family, video=True)
    expected = run_on_one_device(family, inputs)

    def rank(comm: Any) -> Result:
        sp, model = sequence_parallel(comm), build(family)
        WholeBatchHooks(model, wf_transformers.attach_model(model, sp), whole_logits=True)
        return run_whole_batch(model, inputs)

    assert_means_are(expected, run_threads(size, rank))


def test_the_number_of_labels_divides_the_loss_of_a_whole_batch_as_on_one_device() -> None:
    """As the Trainer of transformers 5 passes it; models of transformers 4 ignore it."""
    inputs = media_batch("llava") | {"num_items_in_batch": torch.tensor(50)}
    expected = run_whole_batch(build("llava"), inputs)

    def rank(comm: Any) -> Result:
        sp, model = sequence_parallel(comm), build("llava")
        WholeBatchHooks(model, wf_transformers.attach_model(model, sp), whole_logits=True)
        return run_whole_batch(model, inputs)

    assert_means_are(expected, run_threads(2, rank))


@pytest.mark.parametrize(("layout", "count"), [("zigzag", 3), ("contiguous", 1)])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "llava"])
def test_images_of_a_rank_are_not_compared_as_if_they_were_rows_of_its_tokens(
    family: str, layout: str, count: int
) -> None:
    """On the first batch, when they are as many as a rank would have of that many tokens."""
    inputs = llava_batch((1, count)) if family == "llava" else qwen_batch((1, 2), video=True)

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm, layout), build(family)
        attach = partial(wf_transformers.attach_model, model, sp)
        handle = wf_transformers.attach_by(ModelOptions(verify="strict"), model, sp, attach)
        WholeBatchHooks(model, handle)
        model(**inputs)

    run_threads(2, rank)


@pytest.mark.parametrize("family", MODELS)
def test_padding_with_recomputed_layers_is_exact(family: str) -> None:
    """As a processor pads samples of different lengths."""
    inputs = right_padded(media_batch(family))
    expected = run_on_one_device(family, inputs)

    def rank(model: Any, sp: Any) -> Result:
        model.gradient_checkpointing_enable()
        return run_on_shard(model, sp, wf_transformers.shard_media(model, sp, inputs))

    valid = inputs["attention_mask"] == 1
    assert_shares_sum_to(expected, on_ranks(family, rank), valid)


def test_the_first_batch_of_sounds_is_verified() -> None:
    """Tokens of sounds are hidden from Qwen2-Audio's embeddings on several ranks."""
    inputs = media_batch("qwen2_audio")

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("qwen2_audio")
        attach = partial(wf_transformers.attach_model, model, sp)
        handle = wf_transformers.attach_by(ModelOptions(verify="strict"), model, sp, attach)
        WholeBatchHooks(model, handle)
        model(**inputs)

    run_threads(2, rank)


def test_features_in_the_output_are_not_compared_as_if_they_were_rows_of_tokens() -> None:
    """An image of 4 tokens, 2 on each rank, is in the output of LLaVA of transformers 5."""
    inputs = llava_batch((1,))  # [3, 4, 4 of the image, 7, 8, 3 of text]
    inputs = {k: x[:, :8] if k != "pixel_values" else x for k, x in inputs.items()}

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm, "contiguous"), build("llava")
        attach = partial(wf_transformers.attach_model, model, sp)
        handle = wf_transformers.attach_by(ModelOptions(verify="strict"), model, sp, attach)
        WholeBatchHooks(model, handle)
        model(**inputs)

    run_threads(2, rank)


def test_a_rank_encodes_only_the_images_that_it_has_tokens_of() -> None:
    """Rank 0 has tokens 0 to 11 of both samples; of the first, the second image has 11 and 12."""
    first, second, third, of_sample_2 = map(num_patches, GRIDS)
    encoded = assert_exact("qwen2_vl", 2, qwen_batch(), "contiguous")
    assert encoded == [first + second + of_sample_2, second + third]


def test_ranks_without_images_encode_one_for_its_zero_gradients() -> None:
    """The only image is in the first quarter; the encoder has gradients on all 4 ranks."""
    text = torch.full((1, 40), 9)
    inputs = llava_batch((1,))
    ids = torch.cat([inputs["input_ids"], text], 1)
    inputs |= {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100)}
    assert assert_exact("llava", 4, inputs, "contiguous") == [1, 1, 1, 1]


def test_remove_lets_the_model_take_whole_media() -> None:
    def rank(comm: Any) -> None:
        model = build("llava")
        wf_transformers.attach_model(model, sequence_parallel(comm)).remove()
        inputs = without_labels(llava_batch())
        assert model(**inputs).logits.shape[:2] == inputs["input_ids"].shape

    run_threads(2, rank)
