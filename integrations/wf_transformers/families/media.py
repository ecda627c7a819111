"""Images and videos among the tokens: a rank encodes the media of its own tokens.

The tokens are cut as always. A rank gets the media (images, videos) that its tokens stand for, and
selects the features of its tokens, which the model merges into its embeddings. If several ranks
have tokens of a medium, each of them encodes it, so that nothing is sent; a rank's gradient of the
encoder is its part of the sum. Every rank calls the encoder, even without media.

Shapes: b batch, S tokens, s tokens of this rank, n features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends import SequenceParallel
from wf_transformers.models import outermost, row_of

FEATURE_ROWS = "media_rows"
"""Key of a local batch: for each modality, indices of the features of this rank's tokens."""
ROPE = "rope_positions"
TIMES, TYPES = "second_per_grid_ts", "mm_token_type_ids"
"""Arguments for positions only: of videos, and of tokens (0 text, 1 image, 2 video)."""
MERGED = "spatial_merge_size"  # of configs: the side in patches of what becomes one feature
ENCODED = (
    "image_hidden_states",
    "image_outputs",
    "video_outputs",
    "audio_outputs",
)  # of a model: features


@dataclass(frozen=True, slots=True)
class Modality:
    """Images, or videos."""

    values: str
    """The argument with the pixels."""
    token: str
    """The config's field for the token that stands for a feature."""
    features: str
    """The method that encodes them, in models that have it."""
    grid: str | None = None
    """The argument (media, 3) with the number of patches in time, height and width. None: every
    medium is one row of pixels, and all have the same number of tokens."""
    sizes: str | None = None
    """Without `grid`: the argument (media, 2) with height and width in pixels, for encoders that
    give each patch inside them a token."""


@dataclass(frozen=True, slots=True)
class Media:
    """How one class of models takes media."""

    modalities: tuple[Modality, ...]
    modules: tuple[str, ...]
    """The modules that see media, and no tokens. The last one returns the features (n, width)."""
    rope: bool = False
    """Whether positions are (3, b, S), from the model's get_rope_index."""


IMAGES = Modality("pixel_values", "image_token_id", "get_image_features", "image_grid_thw")
VIDEOS = Modality("pixel_values_videos", "video_token_id", "get_video_features", "video_grid_thw")
QWEN = Media((IMAGES, VIDEOS), ("visual",), rope=True)
PICTURES = Modality("pixel_values", "image_token_index", "get_image_features", sizes="image_sizes")
LLAVA = Media((PICTURES,), ("vision_tower", "multi_modal_projector"))
TILES = Modality("pixel_values", "image_token_id", "get_image_features")
TILED = Media((TILES,), ("vision_tower", "multi_modal_projector"))
SOUNDS = Modality("input_features", "audio_token_id", "get_audio_features")
TABLE: Mapping[str, Media] = MappingProxyType(
    {
        "Qwen2VLForConditionalGeneration": QWEN,
        "Qwen2_5_VLForConditionalGeneration": QWEN,
        "Qwen3VLForConditionalGeneration": QWEN,
        "Qwen3VLMoeForConditionalGeneration": QWEN,
        "Qwen3_5ForConditionalGeneration": QWEN,
        "Qwen3_5MoeForConditionalGeneration": QWEN,
        "LlavaForConditionalGeneration": LLAVA,
        "Mistral3ForConditionalGeneration": LLAVA,
        "InternVLForConditionalGeneration": TILED,
        "VoxtralForConditionalGeneration": Media(
            (SOUNDS,), ("audio_tower", "multi_modal_projector")
        ),
    }
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
    return getattr(merging_model(model), "language_model", model)


def merging_model(model: Any) -> Any:
    """The model that merges features into embeddings: in transformers 5 the inner model."""
    return getattr(model, "model", model)


def shard_media(
    model: Any, sp: SequenceParallel, batch: Mapping[str, Any], pad_token_id: int = 0
) -> dict[str, Any]:
    """This rank's part of a batch with images or videos that every rank has.

    Args:
        model: one of the table, such as Qwen2.5-VL or LLaVA, the model passed to `attach`.
        batch: "input_ids" (b, S), other keys of `sp.shard_batch`, and those of the model's
            processor: "pixel_values", "image_sizes", "image_grid_thw", "pixel_values_videos",
            "video_grid_thw", "second_per_grid_ts"; "position_ids" are (3, b, S) in models with
            such positions.

    Returns:
        A batch for `forward_kwargs`.

    Raises:
        NotImplementedError: for another model.
        ValueError: if tokens and features differ in number, or the ranks' batches differ.
    """
    return cut_media(model, sp, batch, partial(sp.shard_batch, pad_token_id=pad_token_id))


def cut_media(
    model: Any, sp: SequenceParallel, batch: Mapping[str, Any], cut: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """As `shard_media`, with a function that cuts what has a row for each token (b, S, ...)."""
    row = media_of(model)
    if row is None:
        raise NotImplementedError(
            f"{type(model).__name__} is none of the models whose media are known: "
            f"{', '.join(TABLE)}"
        )
    media = {key: batch[key] for key in _media_keys(row) if batch.get(key) is not None}
    sp.check_same(media)
    tokens = {k: v for k, v in batch.items() if k not in (*media, TIMES, TYPES)}
    modalities = [x for x in row.modalities if x.values in media]
    for modality in modalities:
        is_feature = batch["input_ids"] == getattr(model.config, modality.token)
        tokens[modality.token] = _number_tokens(is_feature)
    sizes = [_sizes(model, x, media, int(tokens[x.token].max())) for x in modalities]
    if row.rope:
        tokens[ROPE] = rope_positions(model, batch).permute(1, 2, 0)
        tokens.pop("position_ids", None)
    local = cut(tokens)
    if row.rope:
        local["position_ids"] = local.pop(ROPE).permute(2, 0, 1)
    feature_rows: list[Tensor] = []
    for modality, (patches, features) in zip(modalities, sizes, strict=True):
        token_numbers = local.pop(modality.token)
        parts, rows = _media_of_rank(modality, media, patches, features, token_numbers)
        local |= parts
        feature_rows.append(rows)
    return local | ({FEATURE_ROWS: feature_rows} if feature_rows else {})


def _media_keys(row: Media) -> list[str]:
    keys = ((x.values, x.grid, x.sizes) for x in row.modalities)
    return [key for of_modality in keys for key in of_modality if key is not None]


def is_media_argument(key: str) -> bool:
    """Whether an argument has a row for each medium or patch, not for each token."""
    return any(key in _media_keys(row) for row in TABLE.values())


def media_arguments(model: nn.Module) -> list[str]:
    """The arguments of a model of the table that do not have one row per token."""
    row = media_of(model)
    assert row is not None, "no model of the table"
    return [*_media_keys(row), *((TIMES, TYPES, "position_ids") if row.rope else ())]


def rope_positions(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """(3, b, S): positions in time, height and width."""
    positions = batch.get("position_ids")
    if positions is None and batch.get("cu_seqlens") is not None:
        raise ValueError("packed documents with media: give position_ids (3, b, S) that restart")
    if positions is None:
        owner = model if hasattr(model, "get_rope_index") else merging_model(model)
        arguments = {**batch, TYPES: _token_types(model, batch)}
        names = inspect.signature(owner.get_rope_index).parameters
        return owner.get_rope_index(**{key: arguments[key] for key in names if key in arguments})[0]
    if positions.dim() != 3 or len(positions) != 3:
        raise ValueError(f"position_ids must be (3, b, S), got {tuple(positions.shape)}")
    return positions


def _token_types(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """(b, S): 0 for text, 1 for an image, 2 for a video, as from processors of transformers 5.
    Without pixels a medium's token is text."""
    ids = batch["input_ids"]
    types = torch.zeros_like(ids, dtype=torch.int32)
    for number, modality in enumerate(QWEN.modalities, start=1):
        if batch.get(modality.values) is not None:
            types += number * (ids == getattr(model.config, modality.token)).int()
    return types


def _number_tokens(is_feature: Tensor) -> Tensor:
    """(b, S): 1, 2, ... where a token stands for a feature, 0 elsewhere."""
    return is_feature.flatten().cumsum(0).view_as(is_feature) * is_feature


def _media_of_rank(
    modality: Modality,
    media: Mapping[str, Tensor],
    patches: Sequence[int],
    features: Sequence[int],
    token_numbers: Tensor,
) -> tuple[dict[str, Tensor], Tensor]:
    """(arguments for the media that this rank encodes, which of their features its tokens are).

    `patches` and `features` are the numbers of pixel rows and of features of every medium,
    `token_numbers` (b, s) are this rank's, from `_number_tokens`.
    """
    features_of_rank = token_numbers[token_numbers > 0].cpu() - 1
    medium_of_feature = _medium_of_rows(features)
    encoded = medium_of_feature[features_of_rank].unique()
    if not len(encoded):
        encoded = torch.tensor([0])  # every rank calls the encoder; its features are not used
    values, is_encoded = media[modality.values], torch.isin(medium_of_feature, encoded)
    pixel_rows = torch.isin(_medium_of_rows(patches), encoded).to(values.device)
    arguments = {modality.values: values[pixel_rows]}
    for key in (modality.grid, modality.sizes):
        if key is not None and key in media:
            arguments[key] = media[key][encoded.to(media[key].device)]
    return arguments, (is_encoded.cumsum(0)[features_of_rank] - 1).to(values.device)


def _medium_of_rows(sizes: Sequence[int]) -> Tensor:
    """For media of these numbers of rows, the index of each row's medium: 0, ..., 0, 1, ..."""
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def _sizes(
    model: Any, modality: Modality, media: Mapping[str, Tensor], tokens: int
) -> tuple[list[int], list[int]]:
    """The number of pixel rows and of features of every medium.

    Raises:
        ValueError: if `tokens`, which stand for features, are more or fewer than these.
    """
    if modality.sizes is not None and modality.sizes in media:
        side = model.config.vision_config.patch_size * getattr(model.config, MERGED, 1)
        features = (media[modality.sizes] // side).prod(dim=1).tolist()
        patches = [1] * len(features)
    elif modality.grid is None:
        count = len(media[modality.values])
        patches, features = [1] * count, [tokens // count] * count
    else:
        patches_per_feature = getattr(model.config.vision_config, MERGED) ** 2
        patches = media[modality.grid].prod(dim=1).tolist()
        features = [count // patches_per_feature for count in patches]
    if sum(features) != tokens:
        raise ValueError(
            f"{modality.values} are {len(features)} media of {sum(features)} features, and "
            f"input_ids have {tokens} tokens of {modality.token}"
        )
    return patches, features
