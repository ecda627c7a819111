"""Which models take images, videos and sounds among tokens, and how.

Shapes: b batch, S tokens, n features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from wf_transformers.families.media_counts import (
    FRAME_NUMBERS,
    FRAMES,
    NUMBERS,
    Modality,
    by_area,
    by_fourth,
    by_frames,
    by_grid,
    by_merge_sizes,
    by_pixels,
    by_positions,
    by_samples,
    by_shapes,
    equal,
    merging_model,
    packed,
)
from wf_transformers.models import outermost, row_of

MASKS = "transformers.masking_utils"  # since 4.53
masking_utils: Any = import_module(MASKS) if find_spec(MASKS) else None
BLOCK_TYPES = "token_type_ids"
TYPES = "mm_token_type_ids"
"""Of tokens: 0 text, 1 image, 2 video."""
FOR_POSITIONS = (TYPES, "second_per_grid_ts", "video_second_per_grid", "use_audio_in_video")
"""Arguments that only the positions of tokens follow from."""
ENCODED = ("image_hidden_states", "image_outputs", "video_outputs", "audio_outputs")
"""Outputs of models that are features."""


@dataclass(frozen=True, slots=True)
class Media:
    """How one class of models takes media."""

    modalities: tuple[Modality, ...]
    """In the order in which the model encodes them."""
    modules: tuple[str, ...]
    """The modules that do not see the tokens: they see media, or other tokens in the place of those
    of media (Qwen2-Audio's embeddings). The last one returns the features (n, width)."""
    blocks: Callable[[Tensor, Any], Tensor] | None = None
    """From types of tokens (b, S) and the language model's config the block of each token (b, S),
    -1 where there is none: tokens of a block see each other in both directions."""
    types: str = BLOCK_TYPES
    """The argument with these types."""
    in_windows: bool = False
    """Whether only layers with a sliding window have blocks."""
    rope: bool = False
    """Whether positions are (axes, b, S), from the model's get_rope_index."""
    one_by_one: bool = False
    """Whether some module is called once for each medium. ZeRO 3 and FSDP gather parameters at each
    call, on all ranks, which therefore encode equally many."""


def by_image(types: Tensor, _: Any) -> Tensor:
    """Type 1 is an image, 2 a video. Before 4.53 all images of a sample are one block."""
    is_image = (types == 1) | (types == 2)
    first = is_image & ~is_image.roll(1, dims=1)
    first[:, 0] = is_image[:, 0]
    return torch.where(is_image, first.cumsum(dim=1) if masking_utils else 1, -1)


def prefix(types: Tensor, _: Any) -> Tensor:
    """Type 0 is the prefix."""
    return torch.where(types == 0, 0, -1)


def by_image_if_wanted(types: Tensor, config: Any) -> Tensor:
    """Of Gemma 4 only the larger models have blocks."""
    wanted = config.use_bidirectional_attention == "vision"
    return by_image(types, config) if wanted else torch.full_like(types, -1)


HAS_INNER = hasattr(transformers, "LlavaOnevisionModel")  # since 4.52
OF_5 = int(transformers.__version__.partition(".")[0]) >= 5
BLOCKS_IN_WINDOWS = masking_utils is None or hasattr(masking_utils, "blockwise_overlay")
"""Whether a sliding window holds inside of an image: not in transformers 4.53 to 5.1."""
ENDS_VIDEOS = hasattr(masking_utils, "blockwise_overlay")
"""Whether the method for videos gives the feature at the end of one: not in transformers 5.1."""
MERGE_SOUNDS = "_merge_input_ids_with_audio_features"
"""Qwen2-Audio's method for prompts with one token for each sound."""
TOWER = ("vision_tower", "multi_modal_projector")
AUDIO_TOWER = ("audio_tower", "multi_modal_projector")
TILES = Modality("pixel_values", "image_token", "get_image_features", equal)
PROJECTED_TILES = replace(TILES, features="")
CLIPS = Modality("pixel_values_videos", "video_token", "get_video_features", equal)
SOUNDS = Modality("input_features", "audio_token", "get_audio_features", equal)
GRID, VIDEO_GRID = "image_grid_thw", "video_grid_thw"
IMAGES = replace(TILES, count=by_grid, others=(GRID,), rows=GRID)
VIDEOS = replace(CLIPS, count=by_grid, others=(VIDEO_GRID,), rows=VIDEO_GRID)
QWEN = Media((IMAGES, VIDEOS), ("visual",), rope=True)
GRIDS_WITH_LINE_ENDS = tuple(
    replace(x, count=partial(by_grid, line_end=1)) for x in (IMAGES, VIDEOS)
)
GRIDS_OF_ONE_FRAME = tuple(replace(x, count=by_area) for x in (IMAGES, VIDEOS))
GRIDS_OF_SIZES = replace(IMAGES, count=by_merge_sizes, others=(GRID, "image_merge_sizes"))
GRIDS_BETWEEN_BORDERS = replace(IMAGES, count=partial(by_grid, line_end=1, borders=2))
GLM = Media((IMAGES,), ("visual",), rope=True)
"""Its videos have the tokens of images."""
IMAGES_IN_PIXELS = replace(TILES, count=by_pixels, others=("image_sizes",))
PACKED = replace(
    TILES, features="pack_image_features", count=packed, others=("image_sizes", NUMBERS)
)
NEXT_VIDEO = Media((PACKED, CLIPS) if HAS_INNER else (PACKED,), TOWER)
"""Before 4.52 the method for videos gives no features."""
ONEVISION = Media((PACKED, CLIPS) if ENDS_VIDEOS else (PACKED,), TOWER)
PADDED = replace(TILES, others=("pixel_attention_mask",), by_sample=True)
TILES_OF_SHAPES = replace(TILES, count=by_shapes, others=("spatial_shapes", "pixel_attention_mask"))
SOUNDS_IN_FRAMES = replace(SOUNDS, count=by_frames, others=(FRAMES,))
MASKED_SOUNDS = replace(SOUNDS, count=by_frames, others=("input_features_mask",))
MERGED_SOUNDS = replace(SOUNDS_IN_FRAMES, features=MERGE_SOUNDS)
OMNI = Media(
    (SOUNDS_IN_FRAMES, IMAGES, VIDEOS), ("audio_tower", "visual"), rope=True, one_by_one=True
)
DOTS3 = (IMAGES, VIDEOS, replace(SOUNDS, count=by_samples, others=("chunk_sample_lengths",)))
WAVES = Modality("input_values", "audio_token", "get_audio_features", by_samples)
WAVES = replace(WAVES, others=("input_values_mask",))
MUSE = ("vision_tower", "vision_adapter", "vision_projection", "perception_emb_norm")
VIDEO_POSITIONS = ("video_position_ids", FRAME_NUMBERS)
GEMMA4 = Media(
    (
        replace(TILES, count=by_positions, others=("image_position_ids",)),
        replace(CLIPS, count=by_positions, others=VIDEO_POSITIONS, rows=FRAME_NUMBERS),
        replace(SOUNDS, count=by_fourth, others=("input_features_mask",)),
    ),
    ("vision_tower", "embed_vision", "audio_tower", "embed_audio"),
    by_image_if_wanted,
    TYPES,
    in_windows=True,
)
ROWS = (
    ("Qwen2VL Qwen2_5_VL Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe", QWEN),
    ("Qwen2_5OmniThinker Qwen3OmniMoeThinker", OMNI),
    ("Glm4v Glm4vMoe Glm46V GlmOcr", GLM),
    ("Glm5Next", replace(GLM, rope=False)),
    ("Llava Mistral3 MistralLarge4", Media((IMAGES_IN_PIXELS,), TOWER)),
    ("LlavaNext", Media((PACKED,), TOWER)),
    ("LlavaNextVideo", NEXT_VIDEO),
    ("LlavaOnevision", ONEVISION),
    ("Gemma3", Media((TILES,), TOWER, by_image)),
    ("Gemma4", GEMMA4),
    ("MiniMaxM3Sparse", Media((IMAGES, VIDEOS), TOWER)),
    ("Lfm3Vl", Media((IMAGES, VIDEOS), TOWER, one_by_one=True)),
    ("MuseGlimmer", Media((IMAGES, VIDEOS), MUSE)),
    ("MuseSpark", Media((IMAGES, VIDEOS, WAVES), ("audio_tower", *MUSE))),
    ("Exaone4_5_", Media((IMAGES, VIDEOS), ("visual",))),
    ("HyperCLOVAXVisionV2", Media((IMAGES, VIDEOS), ("vision_model", "projector"))),
    ("VideoLlama3", Media((GRIDS_OF_SIZES,), ("vision_model", "projector"))),
    ("Kimi_K25", Media(GRIDS_OF_ONE_FRAME, ("vision_tower", "mm_projector"))),
    ("Dots3Note", Media(DOTS3, ("vision_tower", "audio_tower"))),
    ("HunYuanVL", Media((GRIDS_BETWEEN_BORDERS,), ("vision_tower",), rope=True, one_by_one=True)),
    ("HYV4VL", Media(GRIDS_WITH_LINE_ENDS, ("vision_tower",), rope=True, one_by_one=True)),
    ("InternVL QianfanOCR GotOcr2 Ovis2 VipLlava", Media((TILES,), TOWER)),
    ("AyaVision Cohere2Vision", Media((TILES,), TOWER)),
    ("Llama4", Media((PROJECTED_TILES,), ("vision_model", "multi_modal_projector"))),
    ("DeepseekVL", Media((TILES,), ("vision_model", "aligner"))),
    ("LightOnOcr", Media((IMAGES_IN_PIXELS,), ("vision_encoder", "vision_projection"))),
    ("PaddleOCRVL", Media((IMAGES,), ("visual", "projector"), rope=True, one_by_one=True)),
    ("Lfm2Vl", Media((TILES_OF_SHAPES,), TOWER, one_by_one=not OF_5)),
    ("Idefics2 Idefics3 SmolVLM", Media((PADDED,), ("vision_model", "connector"))),
    ("Qwen2Audio", Media((MERGED_SOUNDS,), ("embed_tokens", *AUDIO_TOWER))),
    ("Voxtral", Media((SOUNDS,), AUDIO_TOWER)),
    ("Qwen3ASR AudioFlamingo3", Media((MASKED_SOUNDS,), AUDIO_TOWER)),
    # Text alone
    ("Aria", Media((), TOWER)),
    ("MiniCPMV4_6", Media((), ("vision_tower", "merger"))),
    # In transformers 4 its prefix is all of a call without labels
    *([("PaliGemma", Media((TILES,), TOWER, prefix))] if OF_5 else []),
)
"""(names of classes without ...ForConditionalGeneration, how they take media)."""
TABLE: Mapping[str, Media] = MappingProxyType(
    {f"{name}ForConditionalGeneration": row for names, row in ROWS for name in names.split()}
    | {"Phi4MultimodalForCausalLM": Media((), ("embed_tokens_extend",))}
)


def media_of(model: nn.Module) -> Media | None:
    """The table's row for a model, by its class or base class."""
    return row_of(TABLE, model)


def media_modules(model: nn.Module) -> set[str]:
    """The names of `Media.modules` in `model`, and of its outputs that are features."""
    rows = map(media_of, outermost(model))
    return {name for row in rows if row is not None for name in (*row.modules, *ENCODED)}


def language_model(model: Any) -> PreTrainedModel:
    """The model that attends over the ranks: `model`, or the language model inside it."""
    if media_of(model) is None:
        return model
    inner = merging_model(model)
    own = getattr(model, "model", model) if inner is model else model
    return getattr(inner, "language_model", getattr(inner, "text_model", own))


def token_of(model: Any, modality: Modality) -> int:
    """The token that stands for a feature. Its field ends in _index in some of transformers 4."""
    config = model.config
    token = getattr(config, f"{modality.token}_id", None)
    return getattr(config, f"{modality.token}_index") if token is None else token


def rope_axes(model: Any) -> int:
    """How many positions each token has, in models with `Media.rope`."""
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or text.rope_scaling
    return len(rope["mrope_section"])


def media_keys(row: Media) -> list[str]:
    return [key for x in row.modalities for key in (x.values, *x.others)]


OF_MEDIA = frozenset(key for row in TABLE.values() for key in media_keys(row))
"""Arguments with a row for each medium or patch, not for each token."""


def media_arguments(model: nn.Module) -> list[str]:
    """The arguments of a model that do not have one row per token; none of another model."""
    row = media_of(model)
    if row is None:
        return []
    return [*media_keys(row), *((*FOR_POSITIONS, "position_ids") if row.rope else ())]
