"""Images and videos among the tokens: a rank encodes those of which it has tokens.

The batch is cut as one of tokens. Of the media a rank gets those that its tokens stand for, and
the features that belong to its tokens; the model merges these into its embeddings as ever. A medium
whose tokens several ranks have is encoded by each of them, so that nothing is sent, and a gradient
of the encoder is a rank's part of the sum. Every rank calls the encoder, with or without media.

Shapes: b batch, S tokens, s tokens of this rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends import SequenceParallel
from wf_transformers.calls import parameter_names, refuse_call
from wf_transformers.handle import Handle

ROWS = "media_rows"
"""In a local batch: of each kind of media, which features are this rank's tokens, in order."""
ROPE = "rope_positions"
TIMES = "second_per_grid_ts"
"""Of videos, for positions alone."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Images, or videos."""

    values: str
    """The argument of pixels."""
    token: str
    """What the config calls the token that stands for a feature."""
    grid: str | None = None
    """The argument (n, 3) of their patches in time, height and width; None: a row of pixels each,
    with as many tokens as any other."""


@dataclass(frozen=True, slots=True)
class Media:
    """How one class of models takes media."""

    encoder: str
    """The module that gives features, (n, width) or (media, n, width), once for each kind."""
    kinds: tuple[Kind, ...]
    language: str = ""
    """The model of tokens in it; "" for itself."""
    rope: bool = False
    """Whether positions are (3, b, S), by the model's get_rope_index."""


IMAGES = Kind("pixel_values", "image_token_id", "image_grid_thw")
VIDEOS = Kind("pixel_values_videos", "video_token_id", "video_grid_thw")
QWEN = Media("visual", (IMAGES, VIDEOS), rope=True)
TABLE: Mapping[str, Media] = MappingProxyType(
    {
        "Qwen2VLForConditionalGeneration": QWEN,
        "Qwen2_5_VLForConditionalGeneration": QWEN,
        "LlavaForConditionalGeneration": Media(
            "multi_modal_projector", (Kind("pixel_values", "image_token_index"),), "language_model"
        ),
    }
)


def media_of(model: nn.Module) -> Media | None:
    """The row of a model; a subclass counts as the class that it comes from."""
    names = (kind.__name__ for kind in type(model).__mro__)
    return next((TABLE[name] for name in names if name in TABLE), None)


def language_model(model: Any) -> PreTrainedModel:
    """What attends over the ranks: the model, or the one of tokens in a model that takes media."""
    row = media_of(model)
    return model if row is None else model.get_submodule(row.language)


def shard_media(
    model: Any, sp: SequenceParallel, batch: Mapping[str, Any], pad_token_id: int = 0
) -> dict[str, Any]:
    """This rank's part of a batch with images or videos that every rank holds whole.

    Args:
        model: Qwen2-VL, Qwen2.5-VL or LLaVA, as `attach` was given it.
        batch: "input_ids" (b, S), and what else `sp.shard_batch` and the model's processor know:
            "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw",
            "second_per_grid_ts"; "position_ids" (3, b, S) where the model has such.

    Returns:
        What `forward_kwargs` takes.

    Raises:
        NotImplementedError: for another model.
        ValueError: if tokens and features differ in number, or the ranks' batches differ.
    """
    row = media_of(model)
    if row is None:
        raise NotImplementedError(
            f"{type(model).__name__} is none of the models whose media are known: "
            f"{', '.join(TABLE)}"
        )
    media = {key: batch[key] for key in _media_keys(row) if batch.get(key) is not None}
    sp.check_same(media)
    tokens = {k: v for k, v in batch.items() if k not in (*media, TIMES)}
    if row.rope:
        tokens[ROPE] = _rope(model, batch).permute(1, 2, 0)
        tokens.pop("position_ids", None)
    kinds = [kind for kind in row.kinds if kind.values in media]
    for kind in kinds:
        tokens[kind.token] = _numbers(batch["input_ids"] == getattr(model.config, kind.token))
    local = sp.shard_batch(tokens, pad_token_id)
    if row.rope:
        local["position_ids"] = local.pop(ROPE).permute(2, 0, 1)
    taken = [_take(model, kind, media, tokens[kind.token], local.pop(kind.token)) for kind in kinds]
    for parts, _ in taken:
        local |= parts
    return local | ({ROWS: [rows for _, rows in taken]} if taken else {})


def _media_keys(row: Media) -> list[str]:
    return [key for kind in row.kinds for key in (kind.values, kind.grid) if key is not None]


def media_words(model: nn.Module) -> list[str]:
    """The arguments of a model of the table that are not by token."""
    row = media_of(model)
    assert row is not None, "no model of the table"
    return [*_media_keys(row), *((TIMES, "position_ids") if row.rope else ())]


def _rope(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """(3, b, S): positions in time, height and width."""
    given = batch.get("position_ids")
    if given is None and batch.get("cu_seqlens") is not None:
        raise ValueError("packed documents with media: give position_ids (3, b, S) that restart")
    if given is None:
        words = inspect.signature(model.get_rope_index).parameters
        return model.get_rope_index(**{key: batch[key] for key in words if key in batch})[0]
    if given.dim() != 3 or len(given) != 3:
        raise ValueError(f"position_ids must be (3, b, S), got {tuple(given.shape)}")
    return given


def _numbers(stands: Tensor) -> Tensor:
    """(b, S): 1, 2, ... where a token stands for a feature, 0 elsewhere."""
    return stands.flatten().cumsum(0).view_as(stands) * stands


def _take(
    model: Any, kind: Kind, media: Mapping[str, Tensor], whole: Tensor, mine: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """(the media of this rank by argument, the rows of their features that are its tokens)."""
    values = media[kind.values]
    patches, features = _sizes(model, kind, media, int(whole.max()))
    ends = torch.tensor(features).cumsum(0)
    wanted = mine[mine > 0].cpu() - 1
    medium = torch.bucketize(wanted, ends, right=True)
    here = medium.unique().tolist() or [0]  # a rank without any encodes one, for nothing
    starts = dict(zip(here, _starts([features[at] for at in here]), strict=True))
    shift = torch.tensor([starts.get(at, 0) - end for at, end in enumerate(_starts(features))])
    parts = values.split(patches)
    found = {kind.values: torch.cat([parts[at] for at in here])}
    if kind.grid is not None:
        found[kind.grid] = media[kind.grid][here]
    return found, (wanted + shift[medium]).to(values.device)


def _sizes(
    model: Any, kind: Kind, media: Mapping[str, Tensor], tokens: int
) -> tuple[list[int], list[int]]:
    """Of every medium (rows of pixels, features).

    Raises:
        ValueError: if the features are not as many as the tokens that stand for them.
    """
    if kind.grid is None:
        count = len(media[kind.values])
        patches, features = [1] * count, [tokens // count] * count
    else:
        merged = model.config.vision_config.spatial_merge_size**2
        patches = media[kind.grid].prod(dim=1).tolist()
        features = [number // merged for number in patches]
    if sum(features) != tokens:
        raise ValueError(
            f"{kind.values} are {len(features)} media of {sum(features)} features, and input_ids "
            f"have {tokens} tokens of {kind.token}"
        )
    return patches, features


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:at]) for at in range(len(sizes))]


def take_media(model: nn.Module, handle: Handle) -> None:
    """Have a model of the table merge the features that `shard_media` names, until removed."""
    row = media_of(model)
    if row is None:
        return
    waiting: list[Tensor] = []
    names = parameter_names(model)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        waiting[:] = kwargs.pop(ROWS, ())
        flat = kwargs.get("position_ids")
        if row.rope and isinstance(flat, Tensor) and flat.dim() == 2:  # of text alone
            kwargs["position_ids"] = flat.expand(3, *flat.shape)
        if handle.sp.size > 1:
            given = dict(zip(names, args, strict=False)) | kwargs
            refuse_call(model, given, names, handle.attention.logits_are_whole)
            kinds = [kind.values for kind in row.kinds if given.get(kind.values) is not None]
            if len(kinds) != len(waiting):
                raise ValueError(
                    f"{type(model).__name__} was called with whole {', '.join(kinds)}: cut the "
                    f"batch by wf_transformers.shard_media(model, sp, batch), which gives a rank "
                    "those of its tokens"
                )
        return args, kwargs

    def select(_: nn.Module, __: Any, features: Tensor) -> Tensor:
        return features.flatten(0, -2)[waiting.pop(0)] if waiting else features

    handle.hooks(
        model.get_submodule(row.encoder).register_forward_hook(select),
        model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
    )
