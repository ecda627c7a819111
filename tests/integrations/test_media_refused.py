"""Media that do not fit the tokens, the model or the ranks are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers as tf  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.media_batches import (  # noqa: E402
    GRIDS,
    IMAGE,
    VIDEO,
    llava_batch,
    qwen_batch,
)
from tests.integrations.media_models import MODELS, build, media_batch  # noqa: E402
from tests.integrations.media_parts import CLIP  # noqa: E402
from tests.integrations.media_ranks import on_ranks, without_labels  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    BUILD_LOCK,
    HEADS,
    SMALL,
    sequence_parallel,
)
from wf_backends.comm import World  # noqa: E402
from wf_transformers import WholeBatchHooks  # noqa: E402
from wf_transformers.families.media_table import BLOCKS_IN_WINDOWS, OF_5  # noqa: E402


@pytest.mark.skipif("qwen3_omni" not in MODELS, reason="transformers 4.51 has no Omni")
def test_sounds_that_are_encoded_by_the_longest_beside_them_are_refused() -> None:
    inputs = media_batch("qwen3_omni")
    inputs["feature_attention_mask"][2, 90:] = 0

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), build("qwen3_omni")
        with pytest.raises(NotImplementedError, match="give sounds of at least 100 frames"):
            wf_transformers.shard_media(model, sp, inputs)

    run_threads(2, rank)


@pytest.mark.skipif(BLOCKS_IN_WINDOWS, reason="windows hold inside of images here")
def test_an_image_longer_than_a_window_is_refused() -> None:
    def rank(model: Any, sp: Any) -> None:
        model.config.text_config.sliding_window = 3
        with pytest.raises(NotImplementedError, match="an image of 4 tokens is longer than"):
            wf_transformers.shard_media(model, sp, media_batch("gemma3"))

    on_ranks("gemma3", rank)


@pytest.mark.skipif(not OF_5, reason="PaliGemma of transformers 4 is refused as a whole")
def test_a_prefix_longer_than_a_window_is_refused() -> None:
    def rank(model: Any, sp: Any) -> None:
        model.config.text_config.sliding_window = 8
        with pytest.raises(NotImplementedError, match="a prefix of 9 tokens is longer than"):
            wf_transformers.shard_media(model, sp, media_batch("paligemma"))

    on_ranks("paligemma", rank)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        pytest.param(
            qwen_batch() | {"image_grid_thw": torch.tensor([(1, 8, 4), *GRIDS[1:]])},
            "4 media of 18 features, and input_ids have 14 tokens of image_tok",
            id="features",
        ),
        pytest.param(
            {k: x for k, x in qwen_batch().items() if k != "image_grid_thw"},
            "pixel_values without 'image_grid_thw'",
            id="grids",
        ),
        pytest.param(
            qwen_batch((1,)) | {"cu_seqlens": (0, 5, 13)},
            "position_ids .* restart",
            id="documents_without_positions",
        ),
        pytest.param(
            qwen_batch((1,)) | {"position_ids": qwen_batch((1,))["input_ids"]},
            r"must be \(3, b, S\)",
            id="positions_of_another_shape",
        ),
    ],
)
def test_shard_media_refuses_inputs_that_do_not_fit(inputs: dict[str, Any], message: str) -> None:
    def rank(model: Any, sp: Any) -> None:
        with pytest.raises(ValueError, match=message):
            wf_transformers.shard_media(model, sp, inputs)

    on_ranks("qwen2_vl", rank)


def test_shard_media_refuses_other_models() -> None:
    sp = sequence_parallel(World(1).comm(0))
    with pytest.raises(NotImplementedError, match="Linear is none of the models whose media"):
        wf_transformers.shard_media(nn.Linear(1, 1), sp, {})


def test_whole_media_beside_sharded_tokens_are_refused() -> None:
    inputs = llava_batch()

    def rank(model: Any, sp: Any) -> None:
        local = sp.shard_batch({"input_ids": inputs["input_ids"]})
        tokens = wf_transformers.forward_kwargs(model, local)
        with pytest.raises(ValueError, match="whole pixel_values: cut the batch by"):
            model(**tokens, pixel_values=inputs["pixel_values"])

    on_ranks("llava", rank)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("name", ["input_features", "mm_encoder_outputs"])
def test_media_that_a_model_of_the_table_does_not_take_are_refused_by_name(
    name: str, cut: bool
) -> None:
    inputs = llava_batch()

    def rank(model: Any, sp: Any) -> None:
        local = {} if cut else wf_transformers.shard_media(model, sp, inputs)
        sounds = {name: torch.ones(1, 3, 16)}
        with pytest.raises(NotImplementedError, match=f"was called with {name} beside"):
            if cut:
                wf_transformers.shard_media(model, sp, inputs | sounds)
            model(**wf_transformers.forward_kwargs(model, local), **sounds)

    on_ranks("llava", rank)


@pytest.mark.parametrize(
    ("family", "name"), [("phi4_multimodal", "image_pixel_values"), ("aria", "pixel_values")]
)
def test_media_of_models_of_text_alone_are_refused_by_name(family: str, name: str) -> None:
    def rank(model: Any, sp: Any) -> None:
        local = wf_transformers.shard_media(model, sp, {"input_ids": torch.full((1, 8), 9)})
        with pytest.raises(NotImplementedError, match=f"was called with {name} beside"):
            model(**wf_transformers.forward_kwargs(model, local), **{name: torch.ones(1, 3, 8, 8)})

    on_ranks(family, rank)


def test_types_of_tokens_that_were_not_cut_with_their_images_are_refused() -> None:
    def rank(model: Any, sp: Any) -> None:
        local = sp.shard_batch(without_labels(media_batch("gemma3")) | {"pixel_values": None})
        kwargs = wf_transformers.forward_kwargs(model, local)
        with pytest.raises(ValueError, match="called with token_type_ids, which would be lost"):
            model(**kwargs)

    on_ranks("gemma3", rank)


@pytest.mark.parametrize(
    ("layout", "more", "message"),
    [
        ("balanced", {}, '"layout": "balanced" follows from a mask'),
        ("document_zigzag", {"cu_seqlens": (0, 8, 23)}, '"layout": "document_zigzag" follows'),
        ("zigzag", {"q_ranges": [(0, 23)]}, "q_ranges say all that is seen"),
    ],
)
def test_what_gives_all_samples_one_mask_is_refused_with_blocks(
    layout: str, more: dict[str, Any], message: str
) -> None:
    inputs = {k: x[:1] for k, x in media_batch("gemma3").items()}
    inputs |= {"pixel_values": llava_batch()["pixel_values"][:3], **more}

    def rank(model: Any, sp: Any) -> None:
        with pytest.raises(ValueError, match=message):
            wf_transformers.shard_media(model, sp, inputs)

    on_ranks("gemma3", rank, layout=layout)


def test_sounds_of_a_rank_with_one_token_are_refused() -> None:
    """Qwen2-Audio takes a single token for one that is generated."""
    mask, ids = (torch.arange(16) < 8).long()[None], torch.full((1, 2), IMAGE)
    sounds = {"input_features": torch.ones(1, 3, 16).double(), "feature_attention_mask": mask}

    def rank(model: Any, sp: Any) -> None:
        local = wf_transformers.shard_media(model, sp, {"input_ids": ids, **sounds})
        with pytest.raises(ValueError, match="merged no features on this rank"):
            model(**wf_transformers.forward_kwargs(model, local))

    on_ranks("qwen2_audio", rank, layout="contiguous")


def test_labels_beside_sharded_media_are_refused() -> None:
    def rank(model: Any, sp: Any) -> None:
        local = wf_transformers.shard_media(model, sp, llava_batch())
        with pytest.raises(ValueError, match="called with labels"):
            model(**wf_transformers.forward_kwargs(model, local), labels=local["labels"])

    on_ranks("llava", rank)


def test_pixels_of_another_model_are_refused_by_name_also_if_a_rank_has_as_many_tokens() -> None:
    """A frame of 4 patches; each of 2 ranks has 4 tokens of whole batches."""
    config = tf.VideoLlavaConfig(
        text_config=tf.LlamaConfig(**SMALL, **HEADS),
        vision_config=tf.CLIPVisionConfig(**CLIP, hidden_size=16, intermediate_size=24),
        vision_feature_layer=-1,
        video_token_index=VIDEO,
    )
    ids = torch.tensor([[VIDEO] * 4 + [3, 4, 5, 6]])

    def rank(comm: Any) -> None:
        with BUILD_LOCK:
            model = tf.VideoLlavaForConditionalGeneration(config)
        WholeBatchHooks(model, wf_transformers.attach_model(model, sequence_parallel(comm)))
        with pytest.raises(NotImplementedError, match="called with pixel_values_videos beside"):
            model(input_ids=ids, pixel_values_videos=torch.ones(1, 1, 3, 8, 8))

    run_threads(2, rank)
