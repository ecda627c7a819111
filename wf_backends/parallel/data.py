"""A full batch made ready for sharding: labels shifted, positions added, padded and masked.

Beside its ids or embeddings a batch may hold
    "labels" (b, S), as Hugging Face has them: the token itself, not the next one;
    "attention_mask" (b, S), 1 = valid, padding on the right only;
    "position_ids" (b, S) or (1, S), which begin anew only where documents or padding do;
    "cu_seqlens": host integers 0 = c0 < ... = S, the documents of every sample;
    "q_ranges", "k_ranges", "attn_mask_types": in its place, the mask of every sample as slices;
    anything else: tensors (b, S, ...).

Padding is never seen by a valid token: under causal attention because it comes last, under full
attention because `cu_seqlens` makes it a document of its own, under slices because it stands in
none. One exception: samples of different lengths have no documents in common; their
"attention_mask" comes back without "cu_seqlens", and only causal attention is right on them.

Shapes: b batch, S sequence length as given, S' the same rounded up to the multiple.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from wf_backends.schedule import SLICE_WORDS, Mask, make_mask

IGNORE_INDEX = -100  # the label that counts for nothing, as in torch's cross_entropy
MASK_WORDS = ("cu_seqlens", *SLICE_WORDS)
"""Of a batch or a call: who sees whom, as host integers; without any it is one document."""
Borders = tuple[int, ...]  # 0 = c0 < c1 < ... : where documents begin and end


def mask_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a batch or a call says of documents or slices."""
    return {key: given[key] for key in MASK_WORDS if given.get(key) is not None}


def prepare_batch(
    batch: Mapping[str, Any],
    *,
    multiple: int,
    pad_token_id: int = 0,
    labels_are_shifted: bool = False,
) -> dict[str, Any]:
    """Shift, number and pad a full batch, so that equal shards of it can be cut along dim 1.

    Args:
        batch: "input_ids" (b, S) or "inputs_embeds" (b, S, width), and what else a batch may hold
            (see the head of this module).
        multiple: S' is the next multiple of this, in tokens.
        pad_token_id: fills "input_ids"; other tensors are filled with 0.
        labels_are_shifted: labels already stand where they are predicted (also: masked models).

    Returns:
        A new dict of the same keys, and "position_ids" counting from 0 in every document (going on
        counting through the padding). "cu_seqlens" is there if documents or an attention_mask were
        given or padding was needed, unless samples differ in length; slices are as given.

    Raises:
        ValueError: for a tensor that is not (b, S, ...), a mask with holes or padding on the
            left, an impossible multiple, cu_seqlens that do not end at S, position_ids that tell
            of documents of which nothing else does, or slices that hold padding; names the key.
    """
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1 token, got {multiple}")
    if not isinstance(batch, Mapping):
        raise ValueError(f'a batch must be such as {{"input_ids": ids}}, got a {_describe(batch)}')
    told = mask_words(batch)
    tensors = {k: v for k, v in batch.items() if k not in told and v is not None}
    size, seqlen = _shape(tensors)
    valid = _valid(tensors.get("attention_mask"))
    mask = make_mask(**told, seqlen=seqlen)
    borders, padded = mask.cu_seqlens or (0, seqlen), -(-seqlen // multiple) * multiple
    if "position_ids" not in tensors:
        tensors["position_ids"] = _positions(borders, tensors).expand(size, -1)
    elif not told:
        _check_positions(tensors["position_ids"], valid)
    if "labels" in tensors:
        ends = () if labels_are_shifted else borders[1:]
        tensors["labels"] = _targets(tensors["labels"], valid, ends)
    fill = {"input_ids": pad_token_id, "labels": IGNORE_INDEX}
    out: dict[str, Any] = {key: _pad(x, padded, fill.get(key, 0)) for key, x in tensors.items()}
    out["position_ids"] = _continue(tensors["position_ids"], padded)
    if told or valid is not None or padded > seqlen:
        lengths = {seqlen} if valid is None else set(valid.sum(dim=1).tolist())
        out |= _padded_mask(mask, told, lengths, padded)
    return out


def _shape(tensors: Mapping[str, Any]) -> tuple[int, int]:
    """(b, S) that every tensor of the batch agrees on."""
    key = "input_ids" if "input_ids" in tensors else "inputs_embeds"
    if key not in tensors:
        raise ValueError(f'a batch needs "input_ids" (b, S), got the keys {sorted(tensors)}')
    if not isinstance(tensors[key], Tensor) or tensors[key].dim() < 2:
        raise ValueError(f"{key} must be a tensor (b, S), got {_describe(tensors[key])}")
    size, seqlen = tensors[key].shape[:2]
    flat = {"input_ids", "labels", "attention_mask", "position_ids"}
    for name, tensor in tensors.items():
        rows = (1, size) if name == "position_ids" else (size,)
        good = isinstance(tensor, Tensor) and tensor.dim() >= 2 and tensor.shape[1] == seqlen
        if not good or tensor.shape[0] not in rows or (name in flat and tensor.dim() != 2):
            wanted = f"({size}, {seqlen})" if name in flat else f"({size}, {seqlen}, ...)"
            raise ValueError(f"{name} must be a tensor {wanted}, got {_describe(tensor)}")
    if seqlen == 0:
        raise ValueError(f"{key} holds no token: {_describe(tensors[key])}")
    return size, seqlen


def _describe(value: Any) -> str:
    return f"{tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"


def _valid(mask: Tensor | None) -> Tensor | None:
    """(b, S) bool, True where a token counts; refuses what is no padding on the right."""
    if mask is None:
        return None
    valid = mask != 0
    if bool((valid[:, 1:] & ~valid[:, :-1]).any()):
        left = bool((~valid[:, 0] & valid.any(dim=1)).any())
        what = "is padded on the left" if left else "has holes"
        raise ValueError(
            f"attention_mask {what}: a sample must be ones and then zeros (pad on the right)"
        )
    return valid


def _check_positions(positions: Tensor, valid: Tensor | None) -> None:
    """Refuse documents of which only positions tell: attention would take them for one."""
    anew = positions[:, 1:] < positions[:, :-1]
    anew = (anew if valid is None else anew & valid[:, 1:]).any(dim=0)
    if bool(anew.any()):
        first, seqlen = 1 + int(anew.int().argmax()), positions.shape[1]
        raise ValueError(
            f'position_ids begin anew at token {first}, without "cu_seqlens": give those of the '
            f"packed documents, such as [0, {first}, {seqlen}], or [0, {seqlen}] for one document"
        )


def _positions(borders: Borders, tensors: Mapping[str, Tensor]) -> Tensor:
    """(1, S) int64, where the batch is: 0, 1, 2, ... in each document."""
    device = next(iter(tensors.values())).device
    parts = [torch.arange(stop - start, device=device) for start, stop in pairwise(borders)]
    return torch.cat(parts)[None]


def _targets(labels: Tensor, valid: Tensor | None, ends: Borders) -> Tensor:
    """What every token has to predict: the next one, and nothing where a document ends.

    Labels stay where they are if there are no `ends`.
    """
    labels = labels if valid is None else labels.masked_fill(~valid, IGNORE_INDEX)
    if ends:
        labels = _pad(labels[:, 1:], labels.shape[1], IGNORE_INDEX)
        labels[:, torch.tensor(ends, device=labels.device) - 1] = IGNORE_INDEX
    return labels


def _pad(tensor: Tensor, length: int, value: int) -> Tensor:
    """`tensor` (b, s, ...) filled up with `value` on the right of dim 1."""
    right = (0, 0) * (tensor.dim() - 2) + (0, length - tensor.shape[1])
    return pad(tensor, right, value=value)


def _continue(positions: Tensor, length: int) -> Tensor:
    """`positions` (b, s) counting on from the last one."""
    more = torch.arange(1, 1 + length - positions.shape[1], device=positions.device)
    return torch.cat([positions, (positions[:, -1:] + more).to(positions.dtype)], dim=1)


def _padded_mask(
    mask: Mask, told: dict[str, Any], lengths: set[int], padded: int
) -> dict[str, Any]:
    """Slices as they were told; or the documents, all padding as one more.

    Of samples of different lengths there is no word.
    """
    if mask.slices is not None:
        mask.check_lengths(min(lengths), min(lengths))
        return told
    if len(lengths) > 1 and mask.cu_seqlens is not None:
        raise ValueError(
            f"attention_mask gives samples of lengths {sorted(lengths)}, but cu_seqlens "
            f"{mask.cu_seqlens} hold for all of them; make the padding documents of their own"
        )
    if len(lengths) > 1:
        return {}
    (length,) = lengths
    if length == 0:
        raise ValueError("attention_mask holds no valid token")
    kept = [c for c in mask.cu_seqlens or (0,) if c < length]
    return {"cu_seqlens": (*kept, length) if length == padded else (*kept, length, padded)}
