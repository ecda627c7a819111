"""How many rows of pixels, and how many features, each medium has.

A `Count` takes the model, the media by argument and the number of tokens that stand for features.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wf_transformers.models import transformers_class

Sizes = tuple[list[int], list[int]]
Count = Callable[[Any, Mapping[str, Tensor], int], Sizes]
NUMBERS = "batch_num_images"  # of samples: with more than 1, LLaVA-OneVision takes one tile of each
SHAPES = "spatial_shapes"
SOUND_MASK, FRAME_NUMBERS = "input_features_mask", "num_frames_per_video"
FRAMES, LENGTHS = "feature_attention_mask", "_get_feat_extract_output_lengths"
MERGED = "spatial_merge_size"  # of configs: the side in patches of what becomes one feature


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


def by_shapes(model: Any, media: Mapping[str, Tensor], _: int) -> Sizes:
    """spatial_shapes (images, 2) in patches."""
    features = (media[SHAPES] // model.config.downsample_factor).prod(dim=1).tolist()
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


def by_positions(positions: str, number: str | None = None) -> Count:
    """`positions` (rows, patches, 2) of images or frames are -1 where there is no patch; `number`
    (media,) has the rows of each medium, None = 1."""

    def count(model: Any, media: Mapping[str, Tensor], _: int) -> Sizes:
        side, is_patch = model.config.vision_config.pooling_kernel_size, media[positions] != -1
        features = is_patch.all(dim=2).sum(dim=1) // side**2
        rows = media[number].tolist() if number else [1] * len(features)
        return rows, [int(x.sum()) for x in features.split(rows)]

    return count


def by_fourth(model: Any, media: Mapping[str, Tensor], _: int) -> Sizes:
    """Every fourth frame of a sound that is not padding is a feature."""
    features = media[SOUND_MASK][:, ::4].sum(dim=1)
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
