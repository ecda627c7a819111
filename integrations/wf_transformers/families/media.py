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
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from wf_backends import SequenceParallel
from wf_backends.comm import Communicator, gather_small
from wf_backends.schedule import LAYOUTS, SLICE_ARGUMENTS
from wf_transformers.attention.blocks import BLOCKS, Block
from wf_transformers.calls import refuse_media
from wf_transformers.families.media_counts import (
    FRAMES,
    NUMBERS,
    Modality,
    medium_of_rows,
    merging_model,
    rows_of,
    with_neighbours,
)
from wf_transformers.families.media_table import (
    BLOCKS_IN_WINDOWS,
    FOR_POSITIONS,
    QWEN,
    TABLE,
    TYPES,
    Media,
    media_keys,
    media_of,
    prefix,
    rope_axes,
    token_of,
)
from wf_transformers.models import windows_of

FEATURE_ROWS = "media_rows"
"""Key of a local batch: for each modality, indices of the features of this rank's tokens."""
ROPE = "rope_positions"


def shard_media(
    model: Any, sp: SequenceParallel, batch: Mapping[str, Any], pad_token_id: int = 0
) -> dict[str, Any]:
    """This rank's part of a batch with images or videos that every rank has.

    Args:
        model: one of the table, such as Qwen2.5-VL or LLaVA, the model passed to `attach`.
        batch: "input_ids" (b, S), other keys of `sp.shard_batch`, and those of the model's
            processor: "pixel_values", "image_sizes", "image_grid_thw", "pixel_values_videos",
            "video_grid_thw", "second_per_grid_ts"; "position_ids" are (axes, b, S) in models with
            such positions.

    Returns:
        A batch for `forward_kwargs`.

    Raises:
        NotImplementedError: for another model, for media that it does not take, and for a prefix
            (PaliGemma 2), in some releases an image (Gemma 3), longer than a sliding window.
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
    media = {key: batch[key] for key in media_keys(row) if batch.get(key) is not None}
    refuse_media(model, {key: x for key, x in batch.items() if key not in media})
    sp.check_same(media)
    blocks = _blocks(model, row, batch, sp.config.layout)
    not_cut = (*media, *FOR_POSITIONS, *((row.types,) if row.blocks else ()))
    tokens = {k: v for k, v in batch.items() if k not in not_cut}
    modalities = [x for x in row.modalities if x.values in media]
    for modality in modalities:
        is_feature = batch["input_ids"] == token_of(model, modality)
        tokens[modality.token] = is_feature.flatten().cumsum(0).view_as(is_feature) * is_feature
        if modality.by_sample:
            media |= _without_padding(modality, media)
    counts = [_features_of(model, x, media, int(tokens[x.token].max())) for x in modalities]
    if row.rope:
        tokens[ROPE] = rope_positions(model, batch).permute(1, 2, 0)
        tokens.pop("position_ids", None)
    local = cut(tokens)
    if row.rope:
        local["position_ids"] = local.pop(ROPE).permute(2, 0, 1)
    feature_rows: list[Tensor] = []
    for modality, features in zip(modalities, counts, strict=True):
        agree = sp.comm if row.one_by_one else None
        parts, rows = _media_of_rank(modality, media, features, local.pop(modality.token), agree)
        local |= parts
        feature_rows.append(rows)
    return local | ({FEATURE_ROWS: feature_rows} if feature_rows else {}) | blocks


def _blocks(model: Any, row: Media, batch: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """{BLOCKS: those of all samples}, or nothing if there are none."""
    types = batch.get(row.types)
    if row.blocks is None or types is None:
        return {}
    numbers = row.blocks(types, model.config.get_text_config())
    if (mask := batch.get("attention_mask")) is not None:
        numbers = numbers.masked_fill(mask == 0, -1)
    samples = tuple(map(_blocks_of_sample, numbers.tolist()))
    if row.blocks is not prefix and not any(samples):
        return {}  # the layers are causal by themselves; PaliGemma's are not
    slices = next((key for key in SLICE_ARGUMENTS if batch.get(key) is not None), None)
    if slices is not None:
        raise ValueError(f"{slices} say all that is seen, and {row.types} too: leave one out")
    if LAYOUTS[layout].needs_documents or LAYOUTS[layout].needs_slices:
        raise ValueError(
            f'"layout": "{layout}" follows from a mask that all samples and layers share, and in '
            f'{type(model).__name__} samples have blocks of their own: take "zigzag"'
        )
    longest = max((x[-1][1] - x[0][0] for blocks in samples for x in blocks), default=0)
    window = min(windows_of(model), default=longest)
    if longest > window and (row.blocks is prefix or not BLOCKS_IN_WINDOWS):
        block, advice = "an image", "a larger window"
        if row.blocks is prefix:
            block, advice = "a prefix", "a shorter prompt"
        raise NotImplementedError(
            f"{type(model).__name__}: {block} of {longest} tokens is longer than the sliding "
            f"window of {window}, which does not hold inside of it; take {advice}"
        )
    return {BLOCKS: (types.shape[1], samples, row.in_windows)}


def _blocks_of_sample(numbers: list[int]) -> tuple[Block, ...]:
    """From the block of each token, -1 = none, the ranges of every block."""
    blocks: dict[int, list[tuple[int, int]]] = {}
    stop = 0
    for number, run in groupby(numbers):
        start, stop = stop, stop + len(list(run))
        if number >= 0:
            blocks.setdefault(number, []).append((start, stop))
    return tuple(map(tuple, blocks.values()))


def rope_positions(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """(axes, b, S): positions in time, height and width; in HunYuan-VL four."""
    positions = batch.get("position_ids")
    if positions is None and batch.get("cu_seqlens") is not None:
        raise ValueError(
            f"packed documents with media: give position_ids ({rope_axes(model)}, b, S) that "
            "restart"
        )
    if positions is None:
        owner = model if hasattr(model, "get_rope_index") else merging_model(model)
        frames = batch.get(FRAMES)
        arguments = {
            **batch,
            TYPES: _token_types(model, batch),
            "audio_seqlens": None if frames is None else frames.sum(dim=1),
            "second_per_grids": batch.get("video_second_per_grid"),
        }
        names = inspect.signature(owner.get_rope_index).parameters
        if "audio_seqlens" in names and arguments.get("attention_mask") is None:
            ids = batch["input_ids"]  # as the Omnis of transformers do without a mask
            return torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        return owner.get_rope_index(**{key: arguments[key] for key in names if key in arguments})[0]
    if positions.dim() != 3 or len(positions) != rope_axes(model):
        raise ValueError(
            f"position_ids must be ({rope_axes(model)}, b, S), got {tuple(positions.shape)}"
        )
    return positions


def _token_types(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """(b, S): 0 for text, 1 for an image, 2 for a video, as from processors of transformers 5.
    Without pixels a medium's token is text."""
    ids = batch["input_ids"]
    types = torch.zeros_like(ids, dtype=torch.int32)
    for number, modality in enumerate(QWEN.modalities, start=1):
        if batch.get(modality.values) is not None:
            types += number * (ids == token_of(model, modality)).int()
    return types


def _without_padding(modality: Modality, media: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arguments (samples, n, ...) of a modality as (media, ...), without those of zeros."""
    flat = {
        key: media[key].flatten(0, 1) for key in (modality.values, *modality.others) if key in media
    }
    is_medium = flat[modality.values].flatten(1).any(dim=1)
    return {key: x[is_medium] for key, x in flat.items()}


def _media_of_rank(
    modality: Modality,
    media: Mapping[str, Tensor],
    features: Sequence[int],
    token_numbers: Tensor,
    agree: Communicator | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """(arguments for the media that this rank encodes, which of their features its tokens are).

    `features` are the numbers of features of every medium; `token_numbers` (b, s) number this
    rank's tokens that stand for features, from 1, and are 0 elsewhere. The ranks of `agree` encode
    equally many.
    """
    features_of_rank = token_numbers[token_numbers > 0].cpu() - 1
    medium_of_feature = medium_of_rows(features)
    encoded = medium_of_feature[features_of_rank].unique()
    if NUMBERS in modality.others and NUMBERS in media:
        encoded = with_neighbours(encoded, media[NUMBERS].cpu())
    if not len(encoded):
        encoded = torch.tensor([0])  # every rank calls the encoder; its features are not used
    if agree is not None:
        most = int(gather_small(agree, torch.tensor(len(encoded))).max())
        others = torch.arange(len(features))
        others = others[~torch.isin(others, encoded)][: most - len(encoded)]
        encoded = torch.cat([encoded, others]).sort().values
    values, is_encoded = media[modality.values], torch.isin(medium_of_feature, encoded)
    pixel_rows = torch.isin(medium_of_rows(rows_of(modality, media)), encoded).to(values.device)
    arguments = {modality.values: values[pixel_rows]}
    for key in modality.others:
        if key == NUMBERS and key in media:
            samples = medium_of_rows(media[key].tolist())[encoded]
            arguments[key] = samples.unique(return_counts=True)[1].to(values.device)
        elif key in media:
            rows = pixel_rows if len(media[key]) == len(values) else encoded
            arguments[key] = media[key][rows.to(media[key].device)]
    if modality.by_sample:
        arguments = {key: x[None] for key, x in arguments.items()}
    return arguments, (is_encoded.cumsum(0)[features_of_rank] - 1).to(values.device)


def _features_of(
    model: Any, modality: Modality, media: Mapping[str, Tensor], tokens: int
) -> list[int]:
    """The number of features of every medium."""
    try:
        features = torch.as_tensor(modality.count(model, modality, media, tokens)).tolist()
    except KeyError as error:
        problem = f"{modality.values} without {error}: give all that the processor gives"
        raise ValueError(problem) from None
    if sum(features) != tokens:
        raise ValueError(
            f"{modality.values} are {len(features)} media of {sum(features)} features, and "
            f"input_ids have {tokens} tokens of {modality.token}_id"
        )
    return features
