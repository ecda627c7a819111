"""Tiny random models with images, videos and sounds among tokens, of transformers 5 alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.integrations.media_batches import (
    AUDIO,
    GRIDS,
    IMAGE,
    START,
    VIDEO,
    llava_batch,
    num_patches,
    num_tokens,
    omni_batch,
    padded,
    qwen_batch,
    random_normal,
    with_token_types,
    without_types,
)
from tests.integrations.media_parts import (
    EXPERTS,
    IMAGES_AND_VIDEOS,
    OF_4,
    OF_16,
    OMNI_AUDIO,
    TEXT,
    WINDOWS,
    MediaModel,
    rope,
    text,
)

LFM3_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
LFM3_VISION |= {"patch_size": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
PLACES = {"patch_size": 2, "pos_emb_height": 4, "pos_emb_width": 4, "hidden_size": 16}
PLACES |= {"intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
FLAMINGO_AUDIO = {"num_mel_bins": 3, "num_hidden_layers": 2, "num_attention_heads": 2}
FLAMINGO_AUDIO |= {"intermediate_size": 24, "hidden_size": 16, "max_source_positions": 8}
MUSE = {**TEXT, "head_dim": 8, "sliding_window": 5, "eos_token_id": None, "bos_token_id": None}
MUSE_EXPERTS = EXPERTS | {"num_local_experts": 4, "moe_hidden_size": 16}
MUSE_AUDIO = {"patch_sizes": [4, 2], "hidden_sizes": [8, 16], "depths": [1, 1]}
MUSE_AUDIO |= {"out_hidden_size": 32, "num_hidden_layers": 2}
ADAPTER = {"out_hidden_size": 64, "projector_hidden_size": 16}


def images_and_videos() -> dict[str, Any]:
    """Images and a video, for models whose positions do not follow from them."""
    return without_types(qwen_batch(video=True))


def video_llama_3_batch() -> dict[str, Any]:
    """One token for 2 x 2 patches, or for each patch of the last image."""
    grids, sides = [(1, 4, 4), (1, 2, 4), (1, 4, 2), (1, 2, 3)], [2, 2, 2, 1]
    samples = [[3, *[IMAGE] * 4, 7, *[IMAGE] * 2, 8, *[IMAGE] * 2], [4, *[IMAGE] * 6]]
    pixels = random_normal(sum(map(num_patches, grids)), 3 * 2 * 2)
    media = {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
    return media | {"image_merge_sizes": torch.tensor(sides)} | padded(samples)


def kimi_batch() -> dict[str, Any]:
    """Images, and a video whose two frames are one of tokens."""
    batch = images_and_videos()
    ids = batch["input_ids"]
    ids[1, (ids[1] == VIDEO).nonzero()[2:, 0]] = 9
    for key in ("pixel_values", "pixel_values_videos"):
        batch[key] = random_normal(len(batch[key]), 3, 2, 2)
    return batch | {"labels": ids.masked_fill(ids >= START, -100)}


def hunyuan_batch() -> dict[str, Any]:
    """Two samples, of 3 and 1 images, whose lines end with a token, between two tokens."""
    grids = [(1, 4, 4), (1, 4, 4), (1, 4, 6), GRIDS[3]]
    images = [[*[IMAGE] * (num_tokens(grid, 1) + 2), 7, 8] for grid in grids]
    samples = [[3, 4, 5, *images[0], *images[1], *images[2]], [4, 4, 5, *images[3]]]
    pixels = random_normal(sum(map(num_patches, grids)), 3 * 2 * 2)
    media = {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
    return media | with_token_types(padded(samples))


def sounds_batch(frames: tuple[int, ...], lengths: tuple[int, ...]) -> dict[str, Any]:
    """Two samples, of 3 and 1 sounds of `frames` frames with `lengths` tokens."""
    first, second, third, fourth = ([IMAGE] * length for length in lengths)
    seen = (torch.arange(max(frames)) < torch.tensor(frames)[:, None]).long()
    sounds = {"input_features": random_normal(4, 3, max(frames)), "input_features_mask": seen}
    return sounds | padded([[3, *first, 7, *second, 8, *third, 9], [4, *fourth, 7]])


def muse_spark_batch() -> dict[str, Any]:
    """Images, a video, and sounds of 16, 9 and 8 samples with 2, 2 and 1 tokens."""
    batch = omni_batch((16, 9, 8), (2, 2, 1))
    for key in ("input_features", "feature_attention_mask", "video_second_per_grid"):
        del batch[key]
    seen = (torch.arange(16) < torch.tensor([16, 9, 8])[:, None]).long()
    return batch | {"input_values": random_normal(3, 16), "input_values_mask": seen}


NEWEST = {
    "exaone4_5": MediaModel(
        "Exaone4_5_",
        {
            "text_config": text(
                "exaone4",
                head_dim=8,
                sliding_window=5,
                layer_types=["sliding_attention", "full_attention"],
            ),
            "vision_config": {**WINDOWS, "num_key_value_heads": 1},
            **IMAGES_AND_VIDEOS,
        },
        images_and_videos,
    ),
    "hyperclovax": MediaModel(
        "HyperCLOVAXVisionV2",
        {
            "text_config": text("hyperclovax"),
            "vision_config": {"model_type": "qwen2_5_vl_vision", **WINDOWS},
            **IMAGES_AND_VIDEOS,
        },
        images_and_videos,
    ),
    # convolutions in both models
    "lfm3_vl": MediaModel(
        "Lfm3Vl",
        {
            "text_config": text(
                "lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
            ),
            "vision_config": LFM3_VISION,
            "projector_hidden_size": 16,
            **IMAGES_AND_VIDEOS,
        },
        images_and_videos,
    ),
    "qianfan_ocr": MediaModel(
        "QianfanOCR",
        {
            "text_config": text("qwen3", head_dim=8),
            "vision_config": {**OF_4, "image_size": [8, 8], "patch_size": [2, 2]}
            | {"drop_path_rate": 0.0},
            "image_token_id": IMAGE,
        },
        llava_batch,
    ),
    "kimi_k25": MediaModel(
        "Kimi_K25",
        {"text_config": text("llama"), "vision_config": PLACES, "projection_hidden_size": 16}
        | IMAGES_AND_VIDEOS,
        kimi_batch,
    ),
    "video_llama_3": MediaModel(
        "VideoLlama3",
        {"text_config": text("qwen2"), "vision_config": OF_16, **IMAGES_AND_VIDEOS},
        video_llama_3_batch,
    ),
    # a token has four positions
    "hunyuan_vl": MediaModel(
        "HunYuanVL",
        {
            "text_config": {**TEXT, "head_dim": 8, "rope_parameters": rope(1, 1, 1, 1)},
            "vision_config": OF_16
            | {"text_hidden_size": 32, "max_image_size": 16, "min_image_size": 4},
            "image_token_id": IMAGE,
        },
        hunyuan_batch,
    ),
    "muse_spark": MediaModel(
        "MuseSpark",
        {
            "text_config": MUSE | MUSE_EXPERTS,
            "vision_config": PLACES,
            "audio_config": MUSE_AUDIO,
            **ADAPTER,
            **IMAGES_AND_VIDEOS,
            "audio_token_id": AUDIO,
        },
        muse_spark_batch,
        has_experts=True,
    ),
    "muse_glimmer": MediaModel(
        "MuseGlimmer",
        {"text_config": MUSE, "vision_config": PLACES, **ADAPTER, **IMAGES_AND_VIDEOS},
        images_and_videos,
    ),
    "qwen3_asr": MediaModel(
        "Qwen3ASR",
        {
            "text_config": text("qwen3", head_dim=8),
            "audio_config": OMNI_AUDIO | {"downsample_hidden_size": 8, "n_window_infer": 100},
            "audio_token_id": IMAGE,
        },
        partial(sounds_batch, (200, 150, 100, 120), (26, 20, 13, 16)),
    ),
    "audio_flamingo_3": MediaModel(
        "AudioFlamingo3",
        {"text_config": text("qwen2"), "audio_config": FLAMINGO_AUDIO, "audio_token_id": IMAGE},
        partial(sounds_batch, (16, 12, 8, 14), (4, 3, 2, 3)),
    ),
}
