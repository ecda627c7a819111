"""Checks of `attention_mask`: only None and the masks of plain causal or full attention pass.

transformers builds masks from a rank's own rows, as if they were the whole sequence. Such a mask
is recognised and dropped, because the real mask follows from positions. Any other mask is refused,
because what it hides would be lost.

Shapes: b batch, s rows of this rank, h heads.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from wf_backends._compile import eager

ADVICE = (
    "Padding and packed documents are told by cu_seqlens: sp.shard_batch makes them, and "
    "wf_transformers.forward_kwargs passes them on"
)


class MaskCheck:
    """Checks the content of a mask once per forward pass, not once per layer."""

    def __init__(self) -> None:
        self._passed: ref[Tensor] | None = None

    def __call__(self, mask: Any, causal: bool, window: tuple[int, int] | None) -> None:
        """Refuse a mask that may not be dropped: one other than that of causal or full attention,
        with or without the window.

        Args:
            mask: from the model: None, (b, keys) or (b or 1, h or 1, rows or 1, keys), bool
                (True = seen) or additive (0 = seen). A mask of one element per sample passes.
            causal: whether attention is causal.
            window: (left, right): how many keys the model's window shows before and after a row's
                own.
        """
        is_placeholder = (
            isinstance(mask, Tensor) and mask.dim() in (2, 4) and mask.shape[-2:] == (1, 1)
        )
        if mask is not None and not is_placeholder:
            self._check(mask, causal, window)

    @eager
    def _check(self, mask: Any, causal: bool, window: tuple[int, int] | None) -> None:
        """Outside of compiled graphs, which would be guarded by the mask of an earlier call."""
        if self._passed is not None and self._passed() is mask:
            return
        if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"attention_mask of shape {shape} is not understood. {ADVICE}")
        if not _is_plain(mask, causal, window):
            plain = "causal" if causal else "full"
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)} hides more than {plain} attention "
                f"over this rank's rows does, or less, and would be lost. {ADVICE}"
            )
        self._passed = ref(mask)


def padding_of(
    mask: Tensor | None, causal: bool, num_queries: int | None
) -> list[dict[str, Any]] | None:
    """For each sample the slices that hide its padding; None if nothing is padded, or under a
    causal mask: tokens never see padding on their right.

    Args:
        mask: as `MaskCheck` takes it, but over the whole sequence.
        num_queries: of the whole sequence.
    """
    if mask is None:
        return None
    seen = mask != 0 if mask.dim() == 2 or mask.dtype == torch.bool else mask == 0
    seen = seen[:, None, None] if mask.dim() == 2 else seen
    lengths = seen[:, 0, -1].sum(dim=-1)
    valid = torch.arange(seen.shape[-1], device=seen.device) < lengths[:, None, None, None]
    expected = valid & _band(seen, -1, 0) if causal and seen.shape[2] > 1 else valid
    if not bool((seen == expected).all()):
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)} hides other keys than padding on the "
            "right, and would be lost"
        )
    refuse_empty(lengths.tolist())
    full = causal or bool((lengths == seen.shape[-1]).all())
    if full:
        return None
    slices = {"q_ranges": [(0, num_queries)], "attn_mask_types": ["full"]}
    return [{**slices, "k_ranges": [(0, length)]} for length in lengths.tolist()]


def refuse_empty(lengths: list[int]) -> None:
    """Refuse samples without valid tokens, given the valid tokens of each."""
    if 0 in lengths:
        raise ValueError(
            f"attention_mask gives samples of lengths {lengths}: leave out those without valid "
            "tokens"
        )


def _is_plain(mask: Tensor, causal: bool, window: tuple[int, int] | None) -> bool:
    """Whether the mask is that of causal or full attention, with or without the window."""
    additive = mask.dim() == 4 and mask.dtype != torch.bool
    seen = mask == 0 if additive else mask != 0
    if mask.dim() == 2 or mask.shape[2] == 1:
        return bool(seen.all())
    bands = [(-1, 0) if causal else (-1, -1)]
    if window is not None:
        bands.append((window[0], 0) if causal else window)
    return any(bool((seen == _band(seen, left, right)).all()) for left, right in bands)


def _band(seen: Tensor, left: int, right: int) -> Tensor:
    """(rows, keys) bool: True up to `left` keys before and `right` after a row's own; -1 = all."""
    band = torch.ones(seen.shape[2:], dtype=torch.bool, device=seen.device)
    band = band if left < 0 else band.triu(-left)
    return band if right < 0 else band.tril(right)
