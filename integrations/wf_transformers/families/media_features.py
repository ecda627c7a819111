"""Makes a model of the table in media.py merge the features of this rank's tokens alone.

Shapes: n features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wf_transformers.attention.blocks import BLOCKS
from wf_transformers.attention.documents import OF_CALLS
from wf_transformers.attention.function import Attention
from wf_transformers.calls import by_name, parameter_names, refuse_call, refuse_media
from wf_transformers.families.media import FEATURE_ROWS
from wf_transformers.families.media_counts import merging_model
from wf_transformers.families.media_table import (
    MERGE_SOUNDS,
    Media,
    language_model,
    media_of,
    prefix,
    rope_axes,
    token_of,
)
from wf_transformers.handle import Handle
from wf_transformers.models import file_of

MASK_OF_TYPES = "create_causal_mask_mapping"
"""A function in the files of Gemma 3 and PaliGemma of transformers 5.0 to 5.6: it needs the types
of tokens in training, and shows more than is causal. `shard_media` has made blocks of the types."""


class _KeptMask(dict[str, Any]):
    """A mask in the form that `generate` gives it in: the model makes no other of token types."""


def hook_media(model: nn.Module, handle: Handle) -> None:
    """Make a model of the table merge the features that `shard_media` selected: those that its
    methods return (`Modality.features`), else those that its last module for media returns."""
    row = media_of(model)
    if row is None:
        return
    inner, attention = merging_model(model), handle.attention
    methods = [x.features for x in row.modalities if hasattr(inner, x.features)]
    if MERGE_SOUNDS in methods:
        selection = _SoundSelection(model, row, attention)
        handle.before(inner, selection.hide_sounds)
        handle.set(inner, MERGE_SOUNDS, selection.merge_sounds)
    else:
        selection = _FeatureSelection(model, row, attention)
        for method in methods:
            handle.set(inner, method, partial(selection.encode, getattr(inner, method)))
        if not methods:
            owner = model if hasattr(model, row.modules[-1]) else inner
            handle.after(owner.get_submodule(row.modules[-1]), selection.leave)
    handle.before(model, selection.enter, first=True)
    if hasattr(file_of(inner), MASK_OF_TYPES):
        handle.before(inner, selection.keep_mask)
    handle.before(language_model(model), selection.pass_on)
    if hasattr(inner, "inputs_merger"):  # Idefics 3 and SmolVLM of transformers 4
        handle.set(inner, "inputs_merger", partial(_merge, token_of(model, row.modalities[0])))


def _merge(
    token: int, input_ids: Tensor, inputs_embeds: Tensor, image_hidden_states: Tensor
) -> Tensor:
    """The embeddings with features at `token`, however many a sample has on this rank."""
    is_feature = (input_ids == token)[..., None]
    return inputs_embeds.masked_scatter(is_feature, image_hidden_states.to(inputs_embeds))


class _FeatureSelection:
    """Hooks of a model that select the features of this rank's tokens."""

    def __init__(self, model: nn.Module, row: Media, attention: Attention) -> None:
        self.model, self.row, self.attention = model, row, attention
        self.names = parameter_names(model)
        self.pending: list[Tensor] = []
        """Feature indices of the modalities that the running call has not encoded yet."""
        self.documents: dict[str, Any] = {}
        """Documents or slices of the running call, for the language model."""

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the indices from `shard_media`, and refuse media that it did not cut."""
        self.pending[:] = kwargs.pop(FEATURE_ROWS, ())
        self.documents = {key: kwargs.pop(key) for key in OF_CALLS if key in kwargs}
        positions = kwargs.get("position_ids")
        if self.row.rope and isinstance(positions, Tensor) and positions.dim() == 2:  # only text
            kwargs["position_ids"] = positions.expand(rope_axes(self.model), *positions.shape)
        if self.attention.sp.size > 1:
            self._refuse_uncut(by_name(self.names, args, kwargs))
        return args, kwargs

    def _refuse_uncut(self, arguments: dict[str, Any]) -> None:
        name, row = type(self.model).__name__, self.row
        cut = "cut the batch by wf_transformers.shard_media(model, sp, batch)"
        if self.attention.cache is None:
            refuse_call(self.model, arguments, self.names, self.attention.logits_are_whole)
            if row.blocks is not None and arguments.get(row.types) is not None:
                raise ValueError(
                    f"{name} was called with {row.types}, which would be lost: {cut}, which makes "
                    "blocks of them"
                )
        known = [x.values for x in row.modalities]
        refuse_media(self.model, {k: x for k, x in arguments.items() if k not in known})
        media = [key for key in known if arguments.get(key) is not None]
        if len(media) != len(self.pending):
            raise ValueError(
                f"{name} was called with whole {', '.join(media)}: {cut}, which gives a rank those "
                "of its tokens"
            )

    def keep_mask(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hide the mask from the model's `MASK_OF_TYPES`, until `pass_on`. A PaliGemma without
        types, which then sees all of its text, is left to say so."""
        if self.row.blocks is prefix and BLOCKS not in self.documents:
            return None
        mask = kwargs.get("attention_mask")
        kept = mask if isinstance(mask, dict) else _KeptMask(kept=mask)
        return args, kwargs | {"attention_mask": kept}

    def pass_on(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the documents to the language model: not every model passes keywords on, and in an
        encoder borders of tokens would be taken for those of patches."""
        if isinstance(mask := kwargs.get("attention_mask"), _KeptMask):
            kwargs = kwargs | {"attention_mask": mask["kept"]}
        if self.pending and called is not self.model:
            raise ValueError(
                f"{type(self.model).__name__} merged no features on this rank, and tokens of it "
                "stand for some: Qwen2-Audio merges none where a rank has a single token; take "
                "fewer ranks"
            )
        documents, self.documents = self.documents, {}
        return args, kwargs | documents

    def encode(self, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model's method, and keep the features of this rank's tokens."""
        number = len(self.pending)
        features = encode(*args, **kwargs)
        if not number or len(self.pending) < number:  # videos by the method for images
            return features
        return _selected(features, self.pending.pop(0))

    def leave(self, _: nn.Module, __: Any, features: Tensor) -> Tensor:
        """After an encoder module: keep the features of this rank's tokens."""
        return _select(features, self.pending.pop(0)) if self.pending else features


class _SoundSelection(_FeatureSelection):
    """The same for Qwen2-Audio, which calls a method of its own to merge sounds into embeddings."""

    hidden: tuple[Tensor, Any] | None = None
    """(which tokens of the running call stand for features (b, s), its position_ids)."""

    def hide_sounds(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give Qwen2-Audio no token of a sound: it would count those of this rank. It then calls
        `merge_sounds`."""
        if not self.pending or kwargs.get("input_ids") is None:
            return None
        ids = kwargs["input_ids"]
        is_sound = ids == token_of(self.model, self.row.modalities[0])
        self.hidden = is_sound, kwargs.get("position_ids")
        return args, kwargs | {"input_ids": ids.masked_fill(is_sound, 0)}

    def merge_sounds(
        self, features: Tensor, lengths: Tensor, embeds: Tensor, _: Tensor, mask: Any, labels: Any
    ) -> tuple[Any, ...]:
        """(embeddings with the features (sounds, n, width) of this rank's tokens, mask, labels,
        positions, None)"""
        assert self.hidden is not None, "it is called after `hide_sounds`"
        is_sound, positions = self.hidden
        is_valid = torch.arange(features.shape[1], device=lengths.device) < lengths[:, None]
        selected = features[is_valid.to(features.device)][self.pending.pop(0)].to(embeds)
        merged = embeds.masked_scatter(is_sound[..., None], selected)
        return merged, mask, labels, positions, None


def _selected(features: Any, rows: Tensor) -> Any:
    """What a method for features returned, with those at `rows` alone:

    features, or those of each medium           in transformers 4
    (features, lengths or others)               LLaVA-NeXT, LLaVA-OneVision, Ovis 2
    (features, [those of some layers])          Qwen3-VL
    an output with pooler_output                in transformers 5
        and attention_mask (sounds, n)          Gemma 4's sounds, which are padded
        and last_hidden_state, the same         the Omnis' sounds; in 5.0 to 5.10 it alone
        and deepstack_features of some layers   Qwen3-VL
    """
    if isinstance(features, Tensor):
        return _select(features, rows)
    if isinstance(features, (tuple, list)):
        if _are_of_media(features):
            return _select(features, rows)
        first, others = features
        others = others if isinstance(others, Tensor) else [x[rows] for x in others]
        return _select(first, rows), others
    pooled, mask = features.pooler_output, features.get("attention_mask")
    if pooled is None:
        features.last_hidden_state = _select(features.last_hidden_state, rows)
        return features
    if mask is not None:
        features.pooler_output = _select(pooled[mask.bool()], rows)[None]
        features.attention_mask = mask.new_ones(features.pooler_output.shape[:2])
        return features
    features.pooler_output = _select(pooled, rows)
    if features.get("last_hidden_state") is pooled:
        features.last_hidden_state = features.pooler_output
    if layers := features.get("deepstack_features"):
        features.deepstack_features = [_select(x, rows) for x in layers]
    return features


def _are_of_media(features: Sequence[Any]) -> bool:
    """Whether each is the features of a medium, not lengths, or features of another kind."""
    dims = {x.dim() if isinstance(x, Tensor) and x.is_floating_point() else None for x in features}
    return len(dims) == 1 and None not in dims


def _select(features: Any, rows: Tensor) -> Any:
    """Of features (n, width), (media, n, width) or (n, width) of each medium those at `rows`, in
    the same form, as of one medium."""
    if not isinstance(features, Tensor):
        return type(features)([torch.cat([*features])[rows]])
    selected = features.flatten(0, -2)[rows]
    return selected if features.dim() == 2 else selected[None]
