"""Batches of tokens and media for the models of media_models.py."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from wf_transformers.families.media_table import ENDS_VIDEOS

IMAGE, VIDEO, START = 58, 59, 57  # tokens
AUDIO, AUDIO_START = 56, 55
LLAVA_TOKENS = 4  # of an image: (8 / 4)**2 patches

# (frames, height, width) in patches, 4 of which are one token: 4, 2, 2 and 6 tokens
GRIDS = [(1, 4, 4), (1, 2, 4), (1, 4, 2), (1, 6, 4)]
VIDEO_GRID = (2, 4, 2)  # 4 tokens
PATCH_WIDTH = 3 * 2 * 2 * 2  # colours, frames, height, width


def qwen_batch(
    image_counts: tuple[int, ...] = (3, 1), video: bool = False, line_ends: int = 0
) -> dict[str, Any]:
    """A sample of text and images for each of `image_counts`; a video ends the last one. A line of
    an image ends with `line_ends` more tokens."""
    grids, samples = iter(GRIDS), []
    for number, count in enumerate(image_counts):
        tokens = [3 + number, 4, 5]
        for grid in (next(grids) for _ in range(count)):
            tokens += [START, *[IMAGE] * num_tokens(grid, line_ends), 7, 8]
        samples.append(tokens)
    used = GRIDS[: sum(image_counts)]
    media = {
        "pixel_values": random_normal(sum(map(num_patches, used)), PATCH_WIDTH),
        "image_grid_thw": torch.tensor(used),
    }
    if video:
        samples[-1] += [START, *[VIDEO] * num_tokens(VIDEO_GRID, line_ends), 9]
        media |= {
            "pixel_values_videos": random_normal(num_patches(VIDEO_GRID), PATCH_WIDTH),
            "video_grid_thw": torch.tensor([VIDEO_GRID]),
        }
    return media | with_token_types(padded(samples))


def num_patches(grid: tuple[int, int, int]) -> int:
    frames, height, width = grid
    return frames * height * width


def num_tokens(grid: tuple[int, int, int], line_ends: int) -> int:
    frames, height, width = grid
    return frames * (height // 2) * (width // 2 + line_ends)


def with_token_types(batch: dict[str, Any]) -> dict[str, Any]:
    """With the types that processors of transformers 5 give, and its models need."""
    parameters = inspect.signature(tf.Qwen2VLForConditionalGeneration.forward).parameters
    if "mm_token_type_ids" not in parameters:
        return batch
    ids = batch["input_ids"]
    return batch | {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int()}


def llava_batch(image_counts: tuple[int, ...] = (3, 1)) -> dict[str, Any]:
    """A sample of text and images for each of `image_counts`."""
    samples = [
        [3 + number, 4, *([*[IMAGE] * LLAVA_TOKENS, 7, 8] * count)]
        for number, count in enumerate(image_counts)
    ]
    return {"pixel_values": random_normal(sum(image_counts), 3, 8, 8)} | padded(samples)


def llama4_batch() -> dict[str, Any]:
    """With the mask that transformers 4.51 cuts for layers with chunks."""
    batch = llava_batch()
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def pixtral_batch() -> dict[str, Any]:
    """Two samples, of 3 and 1 images, with 2, 1, 4 and 1 tokens: as many as 4 images of 2."""
    sizes = [(4, 8), (4, 4), (8, 8), (4, 4)]
    samples = [[3, *[IMAGE] * 2, 7, IMAGE, 8, *[IMAGE] * 4], [4, IMAGE]]
    media = {"pixel_values": random_normal(4, 3, 8, 8), "image_sizes": torch.tensor(sizes)}
    return media | padded(samples)


def mistral3_batch() -> dict[str, Any]:
    """Two samples, of 3 and 1 images; transformers 5 fails for a single image of one token."""
    sizes = [(4, 8), (8, 4), (8, 8), (4, 8)]  # 2, 2, 4 and 2 tokens
    samples = [[3, *[IMAGE] * 2, 7, *[IMAGE] * 2, 8, *[IMAGE] * 4], [4, *[IMAGE] * 2]]
    media = {"pixel_values": random_normal(4, 3, 8, 8), "image_sizes": torch.tensor(sizes)}
    return media | padded(samples)


def llava_next_batch() -> dict[str, Any]:
    """Two samples, of 2 and 1 images of 16, 14 and 10 tokens: 4 of the whole image, and those of
    the patches of its tiles that are not padding, with one more at the end of each row."""
    sizes = torch.tensor([(16, 8), (8, 16), (8, 8)])  # in patches 4 x 2, 2 x 4, 2 x 2
    samples = [[3, *[IMAGE] * 16, 7, *[IMAGE] * 14], [4, *[IMAGE] * 10]]
    media = {"pixel_values": random_normal(3, 5, 3, 8, 8), "image_sizes": sizes}
    return media | padded(samples)


def onevision_batch() -> dict[str, Any]:
    """The same, and a video of two frames, of one token each, with one more at its end."""
    batch = llava_next_batch()
    if not ENDS_VIDEOS:
        return batch
    ids = torch.cat([batch["input_ids"], torch.tensor([[9, 9, 9, 9], [VIDEO] * 3 + [9]])], 1)
    labels = ids.masked_fill(ids >= START, -100)
    videos = {"pixel_values_videos": random_normal(1, 2, 3, 8, 8)}
    return batch | videos | {"input_ids": ids, "labels": labels}


def images_of_one_tile_batch() -> dict[str, Any]:
    """Three images in a sample, of one tile each, and one of tiles in another."""
    sizes = torch.tensor([(16, 8), (8, 16), (8, 8), (8, 8)])
    samples = [[3, *[IMAGE] * 5, 7, *[IMAGE] * 5, 7, *[IMAGE] * 5], [4, *[IMAGE] * 10]]
    media = {"pixel_values": random_normal(4, 5, 3, 8, 8), "image_sizes": sizes}
    return media | {"batch_num_images": torch.tensor([3, 1])} | padded(samples)


def idefics3_batch() -> dict[str, Any]:
    """Two samples, of 3 and 1 images; an image has a smaller part that is seen."""
    batch = llava_batch()
    pixels, seen = torch.zeros(2, 3, 3, 8, 8).double(), torch.ones(2, 3, 8, 8, dtype=torch.bool)
    pixels[0], pixels[1, 0] = batch["pixel_values"][:3], batch["pixel_values"][3]
    seen[0, 1, 4:] = False
    return batch | {"pixel_values": pixels, "pixel_attention_mask": seen}


def idefics2_batch() -> dict[str, Any]:
    """As of Idefics 3, with three tokens for each image."""
    samples = [[3, *([*[IMAGE] * 3, 7] * 3)], [4, *[IMAGE] * 3, 7]]
    return idefics3_batch() | padded(samples)


def lfm2_vl_batch() -> dict[str, Any]:
    """Two samples, of 3 and 1 images, with 4, 2, 2 and 2 tokens."""
    shapes = torch.tensor([(4, 4), (2, 4), (4, 2), (2, 4)])
    seen = (torch.arange(16) < shapes.prod(dim=1)[:, None]).long()
    media = {"pixel_values": random_normal(4, 16, 12), "pixel_attention_mask": seen}
    samples = [[3, *[IMAGE] * 4, 7, *[IMAGE] * 2, 8, *[IMAGE] * 2], [4, *[IMAGE] * 2]]
    return media | {"spatial_shapes": shapes} | padded(samples)


def paddleocr_vl_batch() -> dict[str, Any]:
    pixels = random_normal(sum(map(num_patches, GRIDS)), 3, 2, 2)
    return qwen_batch() | {"pixel_values": pixels}


def gemma3_batch() -> dict[str, Any]:
    """Types say where images are."""
    batch = llava_batch()
    return batch | {"token_type_ids": (batch["input_ids"] == IMAGE).long()}


def paligemma_batch() -> dict[str, Any]:
    """Types say that the prefixes are the first 12 and 9 tokens."""
    batch = llava_batch((1, 1))
    numbers = torch.arange(batch["input_ids"].shape[1])
    return batch | {"token_type_ids": (numbers >= torch.tensor([[9], [7]])).long()}


def omni_batch(frames: tuple[int, ...], lengths: tuple[int, ...]) -> dict[str, Any]:
    """Images, a video, and three sounds of `frames` frames with `lengths` tokens."""
    batch = qwen_batch(video=True)
    first, second, third = ([AUDIO_START, *[AUDIO] * length, 9] for length in lengths)
    ids = batch["input_ids"].tolist()
    seen = torch.arange(max(frames)) < torch.tensor(frames)[:, None]
    sounds = {"input_features": random_normal(3, 3, max(frames))}
    sounds["feature_attention_mask"] = seen.long()
    batch |= sounds | padded([[*first, *ids[0], *second], [*ids[1], *third]])
    ones = torch.ones_like(batch["input_ids"])
    seconds = torch.ones(1)
    return without_types(batch) | {"attention_mask": ones, "video_second_per_grid": seconds}


def dots3_batch() -> dict[str, Any]:
    """Images, a video, and sounds of 2, 2 and 1 tokens of up to 16 samples, 2 of which are a frame;
    a patch has no frames."""
    batch = omni_batch((16, 9, 8), (2, 2, 1))
    del batch["feature_attention_mask"], batch["video_second_per_grid"]
    return without_frames(batch) | {"chunk_sample_lengths": torch.tensor([32, 19, 16])}


def hy_v4_vl_batch() -> dict[str, Any]:
    """Images and a video, whose lines end with a token."""
    return without_frames(qwen_batch(video=True, line_ends=1))


def without_frames(batch: dict[str, Any]) -> dict[str, Any]:
    """With patches of one frame."""
    pixels = ("pixel_values", "pixel_values_videos")
    return batch | {key: batch[key][:, : PATCH_WIDTH // 2] for key in pixels}


def sound_of_video_batch(frames: int, tokens: int, masked: bool) -> dict[str, Any]:
    """Two samples of a video, with its sound of `tokens` tokens between its frames of 2."""
    pair = [START, AUDIO_START, *[VIDEO] * 2, *[AUDIO] * tokens, *[VIDEO] * 2, 9, 9]
    batch = padded([[3, 4, 5, *pair], [4, 6, *pair]])
    batch |= {"input_features": random_normal(2, 3, frames), "use_audio_in_video": True}
    batch |= {"feature_attention_mask": torch.ones(2, frames).long()}
    batch |= {"pixel_values_videos": random_normal(2 * num_patches(VIDEO_GRID), PATCH_WIDTH)}
    batch |= {"video_grid_thw": torch.tensor([VIDEO_GRID] * 2)}
    mask = {"attention_mask": torch.ones_like(batch["input_ids"])} if masked else {}
    return batch | mask | {"video_second_per_grid": torch.ones(2)}


def gemma4_batch() -> dict[str, Any]:
    """Four images of 1 or 2 tokens, videos of 2 and 1 frames, two sounds of 3 and 2 tokens."""
    sizes = [(2, 2), (2, 4), (4, 2), (2, 2)]
    images = torch.stack([_places(*size) for size in sizes])
    frames = torch.stack([_places(2, 4), _places(2, 4), _places(2, 2)])
    image, seen = [[IMAGE], [IMAGE] * 2], torch.arange(12) < torch.tensor([[12], [7]])
    first = [3, *image[0], 7, *image[1], 8, *image[1], 9, *[VIDEO] * 4, 9, *[AUDIO] * 3]
    batch = padded([first, [4, *image[0], 7, *[VIDEO], 9, *[AUDIO] * 2]])
    ids = batch["input_ids"]
    batch |= {"pixel_values": random_normal(4, 8, 12), "image_position_ids": images}
    batch |= {"pixel_values_videos": random_normal(3, 8, 12), "video_position_ids": frames}
    batch |= {"num_frames_per_video": torch.tensor([2, 1])}
    batch |= {"input_features": random_normal(2, 12, 8), "input_features_mask": seen}
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int() + 3 * (ids == AUDIO).int()
    return batch | {"mm_token_type_ids": types}


def _places(height: int, width: int) -> Tensor:
    """(8, 2): x and y of the patches of an image, and -1."""
    places = [(x, y) for y in range(height) for x in range(width)]
    return torch.tensor(places + [(-1, -1)] * (8 - len(places)))


def without_types(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: x for k, x in batch.items() if k != "mm_token_type_ids"}


def got_ocr2_batch() -> dict[str, Any]:
    return llava_batch() | {"pixel_values": random_normal(4, 3, 32, 32)}


def next_video_batch() -> dict[str, Any]:
    """As of LLaVA-NeXT, and since transformers 4.52 a video of two frames, of one token each."""
    batch = llava_next_batch()
    if not hasattr(tf, "LlavaOnevisionModel"):
        return batch
    ids = torch.cat([batch["input_ids"], torch.tensor([[9, 9, 9], [VIDEO] * 2 + [9]])], 1)
    labels = ids.masked_fill(ids >= START, -100)
    videos = {"pixel_values_videos": random_normal(1, 2, 3, 8, 8)}
    return batch | videos | {"input_ids": ids, "labels": labels}


def qwen2_audio_batch() -> dict[str, Any]:
    """Two samples, of 3 and 1 sounds, of 16, 12, 8 and 16 frames with one token for 4."""
    frames = torch.tensor([[16], [12], [8], [16]])
    samples = [[3, *[IMAGE] * 4, 7, *[IMAGE] * 3, 8, *[IMAGE] * 2, 9], [4, *[IMAGE] * 4, 7]]
    seen = (torch.arange(16) < frames).long()
    sounds = {"input_features": random_normal(4, 3, 16), "feature_attention_mask": seen}
    return sounds | padded(samples)


def voxtral_batch() -> dict[str, Any]:
    """Two samples, of 3 and 1 sounds."""
    sounds = {"input_features": random_normal(4, 3, 16)}
    return {k: x for k, x in llava_batch().items() if k != "pixel_values"} | sounds


def padded(samples: list[list[int]]) -> dict[str, Any]:
    """Samples of one length, with text at their end; media have no labels."""
    length = max(map(len, samples)) + 3
    text = [10 + i % 7 for i in range(length)]
    ids = torch.tensor([tokens + text[: length - len(tokens)] for tokens in samples])
    return {"input_ids": ids, "labels": ids.masked_fill(ids >= START, -100)}


def right_padded(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with the last 4 tokens of its second sample, which are text, as padding."""
    ids, labels = batch["input_ids"], batch["labels"]
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    return batch | {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def random_normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)
