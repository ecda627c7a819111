"""Images and videos among the tokens: a rank encodes those of which it has tokens.

The batch is cut as one of tokens. Of the media a rank gets those that its tokens stand for, and
the features that belong to its tokens; the model merges these into its embeddings as ever. A medium
whose tokens several ranks have is encoded by each of them, so that nothing is sent, and a gradient
of the encoder is a rank's part of the sum. Every rank calls the encoder, with or without media.

Shapes: b batch, S tokens, s tokens of this rank.
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
from wf_transformers.attention import Attention
from wf_transformers.calls import by_name, parameter_names, refuse_call
from wf_transformers.documents import MASK_WORDS
from wf_transformers.handle import Handle
from wf_transformers.models import row_of

ROWS = "media_rows"
"""In a local batch: of each kind of media, which features are this rank's tokens, in order."""
ROPE = "rope_positions"
TIMES, TYPES = "second_per_grid_ts", "mm_token_type_ids"
"""Of videos, and of tokens (0 text, 1 an image, 2 a video): for positions alone."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Images, or videos."""

    values: str
    """The argument of pixels."""
    token: str
    """What the config calls the token that stands for a feature."""
    features: str
    """The method that encodes them, in models that have it."""
    grid: str | None = None
    """The argument (n, 3) of their patches in time, height and width; None: a row of pixels each,
    with as many tokens as any other."""


@dataclass(frozen=True, slots=True)
class Media:
    """How one class of models takes media."""

    kinds: tuple[Kind, ...]
    encoder: str = ""
    """The module that gives features (n, width), once for each kind, where no method does."""
    rope: bool = False
    """Whether positions are (3, b, S), by the model's get_rope_index."""


IMAGES = Kind("pixel_values", "image_token_id", "get_image_features", "image_grid_thw")
VIDEOS = Kind("pixel_values_videos", "video_token_id", "get_video_features", "video_grid_thw")
QWEN = Media((IMAGES, VIDEOS), "visual", rope=True)
PICTURES = Kind("pixel_values", "image_token_index", "get_image_features")
TABLE: Mapping[str, Media] = MappingProxyType(
    {
        "Qwen2VLForConditionalGeneration": QWEN,
        "Qwen2_5_VLForConditionalGeneration": QWEN,
        "LlavaForConditionalGeneration": Media((PICTURES,)),
    }
)


def media_of(model: nn.Module) -> Media | None:
    """The row of a model; a subclass counts as the class that it comes from."""
    return row_of(TABLE, model)


def language_model(model: Any) -> PreTrainedModel:
    """What attends over the ranks: the model, or the one of tokens in a model that takes media."""
    return model if media_of(model) is None else getattr(_merging(model), "language_model", model)


def _merging(model: Any) -> Any:
    """What merges features into embeddings: in transformers 5 the model within."""
    return getattr(model, "model", model)


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
    tokens = {k: v for k, v in batch.items() if k not in (*media, TIMES, TYPES)}
    kinds = [kind for kind in row.kinds if kind.values in media]
    for kind in kinds:
        tokens[kind.token] = _numbers(batch["input_ids"] == getattr(model.config, kind.token))
    sizes = [_sizes(model, kind, media, int(tokens[kind.token].max())) for kind in kinds]
    if row.rope:
        tokens[ROPE] = _rope(model, batch).permute(1, 2, 0)
        tokens.pop("position_ids", None)
    local = sp.shard_batch(tokens, pad_token_id)
    if row.rope:
        local["position_ids"] = local.pop(ROPE).permute(2, 0, 1)
    taken = [
        _take(kind, media, *size, local.pop(kind.token))
        for kind, size in zip(kinds, sizes, strict=True)
    ]
    for parts, _ in taken:
        local |= parts
    return local | ({ROWS: [rows for _, rows in taken]} if taken else {})


def _media_keys(row: Media) -> list[str]:
    return [key for kind in row.kinds for key in (kind.values, kind.grid) if key is not None]


def media_words(model: nn.Module) -> list[str]:
    """The arguments of a model of the table that are not by token."""
    row = media_of(model)
    assert row is not None, "no model of the table"
    return [*_media_keys(row), *((TIMES, TYPES, "position_ids") if row.rope else ())]


def _rope(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """(3, b, S): positions in time, height and width."""
    given = batch.get("position_ids")
    if given is None and batch.get("cu_seqlens") is not None:
        raise ValueError("packed documents with media: give position_ids (3, b, S) that restart")
    if given is None:
        find = getattr(model, "get_rope_index", None) or _merging(model).get_rope_index
        known = {TYPES: _types(model, batch["input_ids"]), **batch}
        words = inspect.signature(find).parameters
        return find(**{key: known[key] for key in words if key in known})[0]
    if given.dim() != 3 or len(given) != 3:
        raise ValueError(f"position_ids must be (3, b, S), got {tuple(given.shape)}")
    return given


def _types(model: Any, ids: Tensor) -> Tensor:
    """(b, S): 0 for text, 1 for an image, 2 for a video, as processors of transformers 5 say it."""
    image, video = ids == model.config.image_token_id, ids == model.config.video_token_id
    return image.int() + 2 * video.int()


def _numbers(stands: Tensor) -> Tensor:
    """(b, S): 1, 2, ... where a token stands for a feature, 0 elsewhere."""
    return stands.flatten().cumsum(0).view_as(stands) * stands


def _take(
    kind: Kind,
    media: Mapping[str, Tensor],
    patches: Sequence[int],
    features: Sequence[int],
    mine: Tensor,
) -> tuple[dict[str, Tensor], Tensor]:
    """(the media of this rank by argument, the rows of their features that are its tokens).

    `patches` and `features` are the sizes of all media, `mine` the numbers of this rank's tokens.
    """
    wanted = mine[mine > 0].cpu() - 1
    owners = _by_medium(features)
    here = owners[wanted].unique() if len(wanted) else torch.tensor([0])  # without any, for nothing
    values, kept = media[kind.values], torch.isin(owners, here)
    found = {kind.values: values[torch.isin(_by_medium(patches), here).to(values.device)]}
    if kind.grid is not None:
        found[kind.grid] = media[kind.grid][here]
    return found, (kept.cumsum(0)[wanted] - 1).to(values.device)


def _by_medium(sizes: Sequence[int]) -> Tensor:
    """The number of the medium of each row, of media with so many rows: 0, ..., 0, 1, ..."""
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


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


def take_media(model: nn.Module, handle: Handle) -> None:
    """Have a model of the table merge the features that `shard_media` names, until removed."""
    row = media_of(model)
    if row is None:
        return
    taking, within = _Taking(model, row, handle.attention), _merging(model)
    handle.hooks(model.register_forward_pre_hook(taking.enter, prepend=True, with_kwargs=True))
    methods = [kind.features for kind in row.kinds if hasattr(within, kind.features)]
    for method in methods:
        handle.set(within, method, partial(taking.encode, getattr(within, method)))
    if not methods:
        handle.hooks(model.get_submodule(row.encoder).register_forward_hook(taking.leave))


class _Taking:
    """The features that a call of a model is to merge."""

    def __init__(self, model: nn.Module, row: Media, attention: Attention) -> None:
        self.model, self.row, self.attention = model, row, attention
        self.names = parameter_names(model)
        self.waiting: list[Tensor] = []  # of each kind, the rows of this rank

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read what `shard_media` says, and refuse media that it did not cut."""
        self.waiting[:] = kwargs.pop(ROWS, ())
        flat = kwargs.get("position_ids")
        if self.row.rope and isinstance(flat, Tensor) and flat.dim() == 2:  # of text alone
            kwargs["position_ids"] = flat.expand(3, *flat.shape)
        if self.attention.sp.size > 1:
            given = by_name(self.names, args, kwargs)
            refuse_call(self.model, given, self.names, self.attention.logits_are_whole)
            kinds = [kind.values for kind in self.row.kinds if given.get(kind.values) is not None]
            if len(kinds) != len(self.waiting):
                raise ValueError(
                    f"{type(self.model).__name__} was called with whole {', '.join(kinds)}: cut "
                    "the batch by wf_transformers.shard_media(model, sp, batch), which gives a "
                    "rank those of its tokens"
                )
        return args, kwargs

    def encode(self, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's own method; of its features, medium by medium, those of this rank.

        Borders of documents are for the tokens' layers; patches have their own.
        """
        found = encode(*args, **{k: v for k, v in kwargs.items() if k not in MASK_WORDS})
        if not self.waiting:
            return found
        if isinstance(found, Tensor):
            return self._select(found)
        found.pooler_output = (self._select(torch.cat(list(found.pooler_output))),)
        return found

    def leave(self, _: nn.Module, __: Any, features: Tensor) -> Tensor:
        """The same behind a module."""
        return self._select(features) if self.waiting else features

    def _select(self, features: Tensor) -> Tensor:
        """(n, width) or (media, n, width) -> (rows of this rank, width)."""
        return features.flatten(0, -2)[self.waiting.pop(0)]
