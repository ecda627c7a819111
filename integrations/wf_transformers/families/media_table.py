"""Which models take images, videos and sounds among tokens, and how.

A `Count` takes the model, the media by argument and the number of tokens that stand for features,
and returns how many rows of pixels, and how many features, each medium has.

Shapes: b batch, S tokens, n features.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from wf_transformers.models import outermost, row_of, transformers_class

Sizes = tuple[list[int], list[int]]
Count = Callable[[Any, Mapping[str, Tensor], int], Sizes]
NUMBERS = "batch_num_images"  # of samples: with more than 1, LLaVA-OneVision takes one tile of each
FRAMES, LENGTHS = "feature_attention_mask", "_get_feat_extract_output_lengths"
MERGED = "spatial_merge_size"  # of configs: the side in patches of what becomes one feature
BLOCK_TYPES = "token_type_ids"
TYPES = "mm_token_type_ids"
"""Of tokens: 0 text, 1 image, 2 video."""
FOR_POSITIONS = (TYPES, "second_per_grid_ts", "video_second_per_grid", "use_audio_in_video")
"""Arguments that only the positions of tokens follow from."""
ENCODED = ("image_hidden_states", "image_outputs", "video_outputs", "audio_outputs")
"""Outputs of models that are features."""


def merging_model(model: Any) -> Any:
    """The model that merges features into embeddings: in transformers 5 the inner model."""
    return getattr(model, "model", model)


def medium_of_rows(sizes: Sequence[int]) -> Tensor:
    """For media of these numbers of rows, the index of each row's medium: 0, ..., 0, 1, ..."""
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def with_neighbours(images: Tensor, numbers: Tensor) -> Tensor:
    """The images (sorted indices), and one more where a sample of several has only one among them:
    alone it would be cut into tiles. `numbers` are those of the images of each sample."""
    sample_of_image = medium_of_rows(numbers.tolist())
    alone = torch.bincount(sample_of_image[images], minlength=len(numbers)) == 1
    first = numbers.cumsum(0) - numbers
    neighbour = first + torch.isin(first, images)
    return torch.cat([images, neighbour[alone & (numbers > 1)]]).unique()


def equal(values: str) -> Count:
    """Media of one row of `values` each, and all of the same number of features."""

    def count(_: Any, media: Mapping[str, Tensor], tokens: int) -> Sizes:
        number = len(media[values])
        return [1] * number, [tokens // number] * number

    return count


def by_grid(grid: str) -> Count:
    """`grid` (media, 3) has the number of patches in time, height and width."""

    def count(model: Any, media: Mapping[str, Tensor], _: int) -> Sizes:
        patches_per_feature = getattr(model.config.vision_config, MERGED) ** 2
        patches = media[grid].prod(dim=1).tolist()
        return patches, [number // patches_per_feature for number in patches]

    return count


def by_pixels(model: Any, media: Mapping[str, Tensor], tokens: int) -> Sizes:
    """image_sizes (media, 2) in pixels, for encoders that give each patch inside them a token."""
    if "image_sizes" not in media:
        return equal("pixel_values")(model, media, tokens)
    side = model.config.vision_config.patch_size * getattr(model.config, MERGED, 1)
    features = (media["image_sizes"] // side).prod(dim=1).tolist()
    return [1] * len(features), features


def by_frames(model: Any, media: Mapping[str, Tensor], _: int) -> Sizes:
    """feature_attention_mask (media, frames): the frames of a sound that are not padding."""
    frames, tower = media[FRAMES].sum(dim=1), merging_model(model).audio_tower
    if hasattr(tower, LENGTHS):
        _, features = getattr(tower, LENGTHS)(frames)
    else:  # Qwen3-Omni
        lengths: Any = vars(sys.modules[transformers_class(tower).__module__])[LENGTHS]
        features, chunk = lengths(frames, tower.n_window), 2 * tower.n_window
        if frames.min() < min(chunk, int(frames.max())):
            raise NotImplementedError(
                f"{type(model).__name__} encodes a sound of {frames.min()} frames as its padding "
                "to the longest beside it says, which another rank may encode: give sounds of at "
                f"least {chunk} frames, or all of one length"
            )
    return [1] * len(features), features.tolist()


def packed(model: Any, media: Mapping[str, Tensor], _: int) -> Sizes:
    """LLaVA-NeXT and LLaVA-OneVision: the model's own code joins the tiles of an image."""
    inner, config, sizes = merging_model(model), model.config, media["image_sizes"]
    cls, side = transformers_class(inner), config.vision_config.image_size
    count: Any = vars(sys.modules[cls.__module__])["image_size_to_num_patches"]
    numbers = media[NUMBERS].tolist() if NUMBERS in media else [1] * len(sizes)
    is_cut = [number == 1 for number in numbers for _ in range(number)]
    points = config.image_grid_pinpoints
    tiles = [count(x, points, side) if cut else 1 for x, cut in zip(sizes, is_cut, strict=True)]
    of_tile = (side // config.vision_config.patch_size) ** 2
    pack: Any = vars(cls)["pack_image_features"]
    names = inspect.signature(pack).parameters
    options = {name: getattr(config, name) for name in names if name.startswith("vision_")}
    empty = [torch.zeros(number, of_tile, 1) for number in tiles]
    _, lengths = pack(inner, empty, sizes, **options, image_newline=torch.zeros(1))
    return [1] * len(sizes), lengths.tolist()


@dataclass(frozen=True, slots=True)
class Modality:
    """Images, or videos, or sounds."""

    values: str
    """The argument with the pixels."""
    token: str
    """The config's field for the token that stands for a feature, without _id or _index."""
    features: str
    """The method that gives their features, in models that have it."""
    count: Count
    """How many rows of `values` and how many features each medium has."""
    others: tuple[str, ...] = ()
    """Further arguments with a row for each medium."""
    by_sample: bool = False
    """Whether arguments are (samples, media of the longest, ...), padded with zeros."""


@dataclass(frozen=True, slots=True)
class Media:
    """How one class of models takes media."""

    modalities: tuple[Modality, ...]
    """In the order in which the model encodes them."""
    modules: tuple[str, ...]
    """The modules that see media, and no tokens. The last one returns the features (n, width)."""
    blocks: Callable[[Tensor], Tensor] | None = None
    """From token_type_ids (b, S) the block of each token (b, S), -1 where there is none: tokens of
    a block see each other in both directions."""
    rope: bool = False
    """Whether positions are (3, b, S), from the model's get_rope_index."""


def by_image(types: Tensor) -> Tensor:
    """Type 1 is an image. In transformers 4 all images of a sample are one block."""
    is_image = types == 1
    first = is_image & ~is_image.roll(1, dims=1)
    first[:, 0] = is_image[:, 0]
    return torch.where(is_image, first.cumsum(dim=1) if HAS_INNER else 1, -1)


def prefix(types: Tensor) -> Tensor:
    """Type 0 is the prefix."""
    return torch.where(types == 0, 0, -1)


HAS_INNER = hasattr(transformers, "LlavaOnevisionModel")  # since transformers 5
MERGE_SOUNDS = "_merge_input_ids_with_audio_features"
"""Qwen2-Audio's method for prompts with one token for each sound."""
IMAGE, VIDEO, AUDIO = "image_token", "video_token", "audio_token"
ENCODE_IMAGES, ENCODE_VIDEOS = "get_image_features", "get_video_features"
ENCODE_SOUNDS = "get_audio_features"
TOWER = ("vision_tower", "multi_modal_projector")
AUDIO_TOWER = ("audio_tower", "multi_modal_projector")
GRID, VIDEO_GRID = "image_grid_thw", "video_grid_thw"
IMAGES = Modality("pixel_values", IMAGE, ENCODE_IMAGES, by_grid(GRID), (GRID,))
VIDEOS = Modality("pixel_values_videos", VIDEO, ENCODE_VIDEOS, by_grid(VIDEO_GRID), (VIDEO_GRID,))
QWEN = Media((IMAGES, VIDEOS), ("visual",), rope=True)
GLM = Media((IMAGES,), ("visual",), rope=True)
"""Its videos have the tokens of images."""
PICTURES = Modality("pixel_values", IMAGE, ENCODE_IMAGES, by_pixels, ("image_sizes",))
LLAVA = Media((PICTURES,), TOWER)
TILES = Modality("pixel_values", IMAGE, ENCODE_IMAGES, equal("pixel_values"))
TILED = Media((TILES,), TOWER)
PACKED = Modality("pixel_values", IMAGE, "pack_image_features", packed, ("image_sizes", NUMBERS))
CLIPS = Modality("pixel_values_videos", VIDEO, ENCODE_VIDEOS, equal("pixel_values_videos"))
ONEVISION = Media((PACKED, CLIPS) if HAS_INNER else (PACKED,), TOWER)
"""In transformers 4 the method for videos gives no features."""
PADDED = replace(TILES, others=("pixel_attention_mask",), by_sample=True)
IDEFICS = Media((PADDED,), ("vision_model", "connector"))
SOUNDS = Modality("input_features", AUDIO, ENCODE_SOUNDS, equal("input_features"))
LISTENED = Modality("input_features", AUDIO, MERGE_SOUNDS, by_frames, (FRAMES,))
HEARD = replace(LISTENED, features=ENCODE_SOUNDS)
OMNI = Media((HEARD, IMAGES, VIDEOS), ("audio_tower", "visual"), rope=True)
TABLE: Mapping[str, Media] = MappingProxyType(
    {
        "Qwen2VLForConditionalGeneration": QWEN,
        "Qwen2_5_VLForConditionalGeneration": QWEN,
        "Qwen3VLForConditionalGeneration": QWEN,
        "Qwen3VLMoeForConditionalGeneration": QWEN,
        "Qwen3_5ForConditionalGeneration": QWEN,
        "Qwen3_5MoeForConditionalGeneration": QWEN,
        "Qwen2_5OmniThinkerForConditionalGeneration": OMNI,
        "Qwen3OmniMoeThinkerForConditionalGeneration": OMNI,
        "Glm4vForConditionalGeneration": GLM,
        "Glm4vMoeForConditionalGeneration": GLM,
        "Glm46VForConditionalGeneration": GLM,
        "GlmOcrForConditionalGeneration": GLM,
        "LlavaForConditionalGeneration": LLAVA,
        "LlavaNextForConditionalGeneration": Media((PACKED,), TOWER),
        "LlavaNextVideoForConditionalGeneration": ONEVISION,
        "LlavaOnevisionForConditionalGeneration": ONEVISION,
        "Gemma3ForConditionalGeneration": Media((TILES,), TOWER, by_image),
        "Mistral3ForConditionalGeneration": LLAVA,
        "InternVLForConditionalGeneration": TILED,
        "GotOcr2ForConditionalGeneration": TILED,
        "Ovis2ForConditionalGeneration": TILED,
        "VipLlavaForConditionalGeneration": TILED,
        "AyaVisionForConditionalGeneration": TILED,
        "Cohere2VisionForConditionalGeneration": TILED,
        "Idefics3ForConditionalGeneration": IDEFICS,
        "SmolVLMForConditionalGeneration": IDEFICS,
        "Qwen2AudioForConditionalGeneration": Media((LISTENED,), AUDIO_TOWER),
        "VoxtralForConditionalGeneration": Media((SOUNDS,), AUDIO_TOWER),
    }
    # In transformers 4 its prefix is all of a call without labels
    | ({"PaliGemmaForConditionalGeneration": Media((TILES,), TOWER, prefix)} if HAS_INNER else {})
)


def media_of(model: nn.Module) -> Media | None:
    """The table's row for a model, by its class or base class."""
    return row_of(TABLE, model)


def media_modules(model: nn.Module) -> set[str]:
    """The names of modules in `model` that see media, and no tokens; of its outputs from these."""
    rows = map(media_of, outermost(model))
    return {name for row in rows if row is not None for name in (*row.modules, *ENCODED)}


def language_model(model: Any) -> PreTrainedModel:
    """The model that attends over the ranks: `model`, or the language model inside it."""
    if media_of(model) is None:
        return model
    inner = merging_model(model)
    return getattr(inner, "language_model", getattr(inner, "text_model", model))


def token_of(model: Any, modality: Modality) -> int:
    """The token that stands for a feature. Its field ends in _index in some of transformers 4."""
    config = model.config
    token = getattr(config, f"{modality.token}_id", None)
    return getattr(config, f"{modality.token}_index") if token is None else token


def media_keys(row: Media) -> list[str]:
    return [key for x in row.modalities for key in (x.values, *x.others)]


def is_media_argument(key: str) -> bool:
    """Whether an argument has a row for each medium or patch, not for each token."""
    return any(key in media_keys(row) for row in TABLE.values())


def media_arguments(model: nn.Module) -> list[str]:
    """The arguments of a model of the table that do not have one row per token."""
    row = media_of(model)
    assert row is not None, "no model of the table"
    return [*media_keys(row), *((*FOR_POSITIONS, "position_ids") if row.rope else ())]
