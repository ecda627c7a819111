"""Prepares a full batch for sharding: shifts labels, adds positions, pads and masks.

Besides its ids or embeddings a batch may contain
    "labels" (b, S), as in Hugging Face: the token itself, not the next one;
    "attention_mask" (b, S), 1 = valid, padding on the right only;
    "position_ids" (b, S) or (1, S), which restart only where documents or padding start;
    "cu_seqlens": host integers 0 = c0 < ... = S, the documents of every sample;
    "q_ranges", "k_ranges", "attn_mask_types": in its place, the mask of every sample as slices;
    anything else: tensors (b, S, ...).

No valid token sees padding: under causal attention because it comes last, under full attention
because `cu_seqlens` makes it a separate document, under slices because no slice contains it. One
exception: samples of different lengths have no common `cu_seqlens`, so the batch is returned
without it: causal attention is right for them, and wf_transformers gives full attention theirs.

Shapes: b batch, S sequence length as given, S' the same rounded up to the multiple.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from wf_backends.schedule import SLICE_ARGUMENTS, Mask, make_mask

IGNORE_INDEX = -100  # the label of tokens without a loss, as in torch's cross_entropy
MASK_ARGUMENTS = ("cu_seqlens", *SLICE_ARGUMENTS)
"""Keys of a batch or a call for its documents or slices; without them it is one document."""
Borders = tuple[int, ...]  # 0 = c0 < c1 < ... : where documents begin and end


def mask_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The documents or slices of a batch or of a call's arguments: their keys and values."""
    return {key: arguments[key] for key in MASK_ARGUMENTS if arguments.get(key) is not None}


def prepare_batch(
    batch: Mapping[str, Any],
    *,
    multiple: int,
    pad_token_id: int = 0,
    labels_are_shifted: bool = False,
) -> dict[str, Any]:
    """Shift the labels, add positions and pad a full batch, so that dim 1 has equal shards.

    Args:
        batch: "input_ids" (b, S) or "inputs_embeds" (b, S, width), and the optional keys that the
            docstring of this module lists.
        multiple: S' is the next multiple of this, in tokens.
        pad_token_id: fills "input_ids"; other tensors are filled with 0.
        labels_are_shifted: labels already stand where they are predicted (also: masked models).

    Returns:
        A new dict with the same keys and "position_ids", which count from 0 in every document. The
        padding of S to S' has the last token's: models learned no later one, and derive frequencies
        from the longest. It has "cu_seqlens" if the batch had documents or an attention_mask or was
        padded, unless samples differ in length; slices are unchanged. Labels of any integer dtype
        become int64.

    Raises:
        ValueError: for a tensor that is not (b, S, ...), a mask of other numbers, with holes or
            padding on the left, an impossible multiple, cu_seqlens that do not end at S, slices
            with padding, or position_ids that restart without cu_seqlens or slices; names the key.
    """
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1 token, got {multiple}")
    if not isinstance(batch, Mapping):
        raise ValueError(f'a batch must be such as {{"input_ids": ids}}, got a {_describe(batch)}')
    mask_kwargs = mask_arguments(batch)
    tensors = {k: v for k, v in batch.items() if k not in mask_kwargs and v is not None}
    size, seqlen = _shape(tensors)
    padded_len = -(-seqlen // multiple) * multiple
    valid = _valid(tensors.get("attention_mask"))
    mask = make_mask(**mask_kwargs, seqlen=seqlen)
    borders = mask.cu_seqlens or (0, seqlen)
    if "position_ids" not in tensors:
        tensors["position_ids"] = _positions(borders, tensors).expand(size, -1)
    elif not mask_kwargs:
        _check_positions(tensors["position_ids"], valid)
    if "labels" in tensors:
        ends = () if labels_are_shifted else borders[1:]
        tensors["labels"] = _targets(tensors["labels"], valid, ends)
    fill = {"input_ids": pad_token_id, "labels": IGNORE_INDEX}
    out: dict[str, Any] = {k: _pad(x, padded_len, fill.get(k, 0)) for k, x in tensors.items()}
    last = tensors["position_ids"][:, -1:].expand(-1, padded_len - seqlen)
    out["position_ids"] = torch.cat([tensors["position_ids"], last], dim=1)
    if mask_kwargs or valid is not None or padded_len > seqlen:
        lengths = {seqlen} if valid is None else set(valid.sum(dim=1).tolist()) or {seqlen}
        out |= _padded_mask_arguments(mask, mask_kwargs, lengths, padded_len)
    return out


def _shape(tensors: Mapping[str, Any]) -> tuple[int, int]:
    """(b, S), after a check that every tensor of the batch has them."""
    key = "input_ids" if "input_ids" in tensors else "inputs_embeds"
    if key not in tensors:
        raise ValueError(f'a batch needs "input_ids" (b, S), got the keys {sorted(tensors)}')
    if not isinstance(tensors[key], Tensor) or tensors[key].dim() < 2:
        raise ValueError(f"{key} must be a tensor (b, S), got {_describe(tensors[key])}")
    size, seqlen = tensors[key].shape[:2]
    two_dims = {"input_ids", "labels", "attention_mask", "position_ids"}
    for name, tensor in tensors.items():
        sizes = (1, size) if name == "position_ids" else (size,)
        fits = isinstance(tensor, Tensor) and tensor.dim() >= 2 and tensor.shape[1] == seqlen
        if not fits or tensor.shape[0] not in sizes or (name in two_dims and tensor.dim() != 2):
            expected = f"({size}, {seqlen})" if name in two_dims else f"({size}, {seqlen}, ...)"
            raise ValueError(f"{name} must be a tensor {expected}, got {_describe(tensor)}")
    if seqlen == 0:
        raise ValueError(f"{key} holds no token: {_describe(tensors[key])}")
    return size, seqlen


def _describe(value: Any) -> str:
    return f"{tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"


def _valid(mask: Tensor | None) -> Tensor | None:
    """(b, S) bool, True at valid tokens; ValueError if they are not at the left of each sample."""
    if mask is None:
        return None
    valid = mask != 0
    if not bool((valid == mask).all()):
        raise ValueError(
            f"attention_mask must be 1 (valid) or 0 (padding), got {mask.unique().tolist()[:9]}: "
            "give packed documents as cu_seqlens"
        )
    if bool((valid[:, 1:] & ~valid[:, :-1]).any()):
        on_left = bool((~valid[:, 0] & valid.any(dim=1)).any())
        fault = "is padded on the left" if on_left else "has holes"
        raise ValueError(
            f"attention_mask {fault}: a sample must be ones and then zeros (pad on the right)"
        )
    return valid


def _check_positions(positions: Tensor, valid: Tensor | None) -> None:
    """Refuse positions (b or 1, S) that restart: attention would see one document, not several."""
    restarts = positions[:, 1:] < positions[:, :-1]
    if valid is not None:
        restarts = restarts & valid[:, 1:]
    restarts = restarts.any(dim=0)
    if bool(restarts.any()):
        first, seqlen = 1 + int(restarts.int().argmax()), positions.shape[1]
        raise ValueError(
            f'position_ids restart at token {first}, without "cu_seqlens": give those of the '
            f"packed documents, such as [0, {first}, {seqlen}], or [0, {seqlen}] for one document"
        )


def _positions(borders: Borders, tensors: Mapping[str, Tensor]) -> Tensor:
    """(1, S) int64 on the batch's device: 0, 1, 2, ... in each document."""
    device = next(iter(tensors.values())).device
    parts = [torch.arange(stop - start, device=device) for start, stop in pairwise(borders)]
    return torch.cat(parts)[None]


def _targets(labels: Tensor, valid: Tensor | None, ends: Borders) -> Tensor:
    """The label that each token has to predict: the next token's; none where a document ends.

    Labels are not shifted if there are no `ends`.
    """
    labels = labels if labels.is_floating_point() else labels.long()  # uint8 holds no -100
    labels = labels if valid is None else labels.masked_fill(~valid, IGNORE_INDEX)
    if ends:
        labels = _pad(labels[:, 1:], labels.shape[1], IGNORE_INDEX)
        labels[:, torch.tensor(ends, device=labels.device) - 1] = IGNORE_INDEX
    return labels


def _pad(tensor: Tensor, length: int, value: int) -> Tensor:
    """`tensor` (b, s, ...) padded on the right of dim 1 with `value`, to (b, length, ...)."""
    right = (0, 0) * (tensor.dim() - 2) + (0, length - tensor.shape[1])
    return pad(tensor, right, value=value)


def _padded_mask_arguments(
    mask: Mask, mask_kwargs: dict[str, Any], lengths: set[int], padded_len: int
) -> dict[str, Any]:
    """The slices unchanged, or "cu_seqlens" with all padding as one more document.

    `lengths` are the samples' numbers of valid tokens. If they differ, no mask fits all.
    """
    if mask.slices is not None:
        mask.check_lengths(min(lengths), min(lengths))
        return mask_kwargs
    if len(lengths) > 1 and mask.cu_seqlens is not None:
        raise ValueError(
            f"attention_mask gives samples of lengths {sorted(lengths)}, but cu_seqlens "
            f"{mask.cu_seqlens} hold for all of them: make the padding one more document"
        )
    if len(lengths) > 1:
        return {}
    (length,) = lengths
    if length == 0:
        raise ValueError("attention_mask holds no valid token")
    borders = [border for border in mask.cu_seqlens or (0,) if border < length] + [length]
    return {"cu_seqlens": (*borders, padded_len) if length < padded_len else tuple(borders)}
