"""Images, or videos, or sounds, and how many features each of them has.

A `Count` takes the model, the modality, the media by argument and the number of tokens that stand
for features, and returns the features of each medium.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wf_transformers.models import file_of, transformers_class

Tensors = Mapping[str, Tensor]
Count = Callable[[Any, "Modality", Tensors, int], Tensor | list[int]]
NUMBERS = "batch_num_images"  # of samples: with more than 1, LLaVA-OneVision takes one tile of each
FRAME_NUMBERS = "num_frames_per_video"
FRAMES, LENGTHS = "feature_attention_mask", "_get_feat_extract_output_lengths"
MERGED = "spatial_merge_size"  # of configs: the side in patches of what becomes one feature


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
    """How many features each medium has."""
    others: tuple[str, ...] = ()
    """Further arguments with a row for each medium, or for each row of `values`."""
    rows: str = ""
    """The argument (media, ...) whose product tells the rows of `values` of a medium; "" = one row.
    """
    by_sample: bool = False
    """Whether arguments are (samples, media of the longest, ...), padded with zeros."""


def merging_model(model: Any) -> Any:
    """The model that merges features into embeddings: since 4.52 mostly an inner model."""
    inner = getattr(model, "model", model)
    encodes = hasattr(model, "get_image_features") or hasattr(model, "get_audio_features")
    return model if encodes and hasattr(inner, "embed_tokens") else inner  # it has tokens alone


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


def rows_of(modality: Modality, media: Tensors) -> list[int]:
    """How many rows of `values` each medium has."""
    if not modality.rows:
        return [1] * len(media[modality.values])
    return media[modality.rows][:, None].flatten(1).prod(dim=1).tolist()


def equal(_: Any, modality: Modality, media: Tensors, tokens: int) -> list[int]:
    """All media have the same number of features."""
    number = len(media[modality.values])
    return [tokens // number] * number


def by_grid(
    model: Any, modality: Modality, media: Tensors, _: int, line_end: int = 0, borders: int = 0
) -> Tensor:
    """`rows` (media, 3) has the number of patches in time, height and width. There may be features
    at the end of each line, and around a medium."""
    config = model.config.vision_config
    side = getattr(config, MERGED, None) or config.merge_size
    frames, height, width = media[modality.rows].unbind(dim=1)
    return frames * (height // side) * (width // side + line_end) + borders


def by_merge_sizes(_: Any, modality: Modality, media: Tensors, __: int) -> Tensor:
    """VideoLLaMA 3: an image has its own side in patches of what becomes one feature."""
    return media[modality.rows].prod(dim=1) // media["image_merge_sizes"] ** 2


def by_area(model: Any, modality: Modality, media: Tensors, _: int) -> Tensor:
    """As `by_grid`, with the mean over all frames as one feature (Kimi K2.5)."""
    height, width = model.config.vision_config.merge_kernel_size
    return media[modality.rows][:, 1:].prod(dim=1) // (height * width)


def by_pixels(model: Any, modality: Modality, media: Tensors, tokens: int) -> Tensor | list[int]:
    """image_sizes (media, 2) in pixels, for encoders that give each patch inside them a token."""
    if "image_sizes" not in media:
        return equal(model, modality, media, tokens)
    side = model.config.vision_config.patch_size * getattr(model.config, MERGED, 1)
    return (media["image_sizes"] // side).prod(dim=1)


def by_shapes(model: Any, _: Modality, media: Tensors, __: int) -> Tensor:
    """spatial_shapes (images, 2) in patches."""
    return (media["spatial_shapes"] // model.config.downsample_factor).prod(dim=1)


def by_frames(model: Any, modality: Modality, media: Tensors, _: int) -> Tensor:
    """The first of `others` (media, frames): the frames of a sound that are not padding."""
    frames, tower = media[modality.others[0]].sum(dim=1), merging_model(model).audio_tower
    lengths = getattr(file_of(tower), LENGTHS, None)  # Qwen3-Omni, Qwen3-ASR
    if lengths is None:
        return getattr(tower, LENGTHS)(frames)[1]
    chunk = 2 * tower.n_window
    if frames.min() < min(chunk, int(frames.max())):
        raise NotImplementedError(
            f"{type(model).__name__} encodes a sound of {frames.min()} frames as its padding to "
            "the longest beside it says, which another rank may encode: give sounds of at least "
            f"{chunk} frames, or all of one length"
        )
    takes_window = len(inspect.signature(lengths).parameters) > 1  # in some releases it is 50
    return lengths(frames, tower.n_window) if takes_window else lengths(frames)


def by_positions(model: Any, modality: Modality, media: Tensors, _: int) -> list[int]:
    """The first of `others` (rows, patches, 2) is -1 where there is no patch."""
    side, is_patch = model.config.vision_config.pooling_kernel_size, media[modality.others[0]] != -1
    features = is_patch.all(dim=2).sum(dim=1) // side**2
    return [int(x.sum()) for x in features.split(rows_of(modality, media))]


def by_fourth(_: Any, __: Modality, media: Tensors, ___: int) -> Tensor:
    """Every fourth frame of a sound that is not padding is a feature."""
    return media["input_features_mask"][:, ::4].sum(dim=1)


def by_samples(model: Any, modality: Modality, media: Tensors, _: int) -> Tensor:
    """The first of `others` has the samples of each sound's waveform (dots3-note: of each chunk of
    a sound), or a mask (media, samples) of them; a feature takes up to `samples_per_token`."""
    samples = media[modality.others[0]][:, None].flatten(1).sum(dim=1)
    per_feature = model.config.audio_config.samples_per_token
    return (samples + per_feature - 1) // per_feature


def packed(model: Any, _: Modality, media: Tensors, __: int) -> Tensor:
    """LLaVA-NeXT and LLaVA-OneVision: the model's own code joins the tiles of an image."""
    inner, config, sizes = merging_model(model), model.config, media["image_sizes"]
    cls, side = transformers_class(inner), config.vision_config.image_size
    count = file_of(inner).image_size_to_num_patches
    numbers = media[NUMBERS].tolist() if NUMBERS in media else [1] * len(sizes)
    is_cut = [number == 1 for number in numbers for _ in range(number)]
    points = config.image_grid_pinpoints
    tiles = [count(x, points, side) if cut else 1 for x, cut in zip(sizes, is_cut, strict=True)]
    of_tile = (side // config.vision_config.patch_size) ** 2
    pack: Any = vars(cls)["pack_image_features"]
    names = inspect.signature(pack).parameters
    options = {name: getattr(config, name) for name in names if name.startswith("vision_")}
    empty = [torch.zeros(number, of_tile, 1) for number in tiles]
    return pack(inner, empty, sizes, **options, image_newline=torch.zeros(1))[1]
