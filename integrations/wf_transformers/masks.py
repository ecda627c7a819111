"""What may arrive as `attention_mask`: nothing, or what says no more than causal or full does.

transformers builds masks from a rank's own rows, as if they were the whole sequence. Such a mask
is recognised and left out, because the real mask follows from positions. Anything else would
be lost, and is refused.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

ADVICE = (
    "Padding and packed documents are told by cu_seqlens: sp.shard_batch makes them, and "
    "wf_transformers.forward_kwargs passes them on"
)


def silent_mask(size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """(b, 1, 1, 1): says nothing, and spares the model to build a mask of (s, s) elements.

    Args:
        dtype: wide enough for the least number of the model's dtype, which some write into it.
    """
    return torch.zeros(size, 1, 1, 1, device=device, dtype=dtype)


class MaskCheck:
    """Looks at the content of a mask once per forward pass, not once per layer."""

    def __init__(self) -> None:
        self._passed: ref[Tensor] | None = None

    def __call__(self, mask: Any, causal: bool, window: tuple[int, int] | None) -> None:
        """Return if `mask` may be left out.

        Args:
            mask: what the model handed over: None, (b, keys) or (b or 1, h or 1, rows or 1, keys),
                bool (True = seen) or additive (0 = seen). One element per sample says nothing.
            causal: whether attention is causal.
            window: (left, right) tokens beside a row's own that the model's window shows.

        Raises:
            ValueError: if the mask says more than `causal` and `window` do.
        """
        if mask is None or (self._passed is not None and self._passed() is mask):
            return
        if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
            what = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"attention_mask of shape {what} is not understood. {ADVICE}")
        if mask.shape[-2:] != (1, 1) and not _says_nothing(mask, causal, window):
            kind = "causal" if causal else "full"
            raise ValueError(
                f"attention_mask of shape {tuple(mask.shape)} hides more than {kind} attention "
                f"over this rank's rows does, or less, and would be lost. {ADVICE}"
            )
        self._passed = ref(mask)


def padding_of(mask: Tensor | None, causal: bool) -> list[int] | None:
    """Of a mask of the whole sequence: how many keys each sample has, where padding is hidden.

    Args:
        mask: as `MaskCheck` takes it, but not of this rank's rows. Under a causal one padding on
            the right hides nothing from a token.

    Raises:
        ValueError: if it says anything else.
    """
    if mask is None:
        return None
    seen = mask != 0 if mask.dim() == 2 or mask.dtype == torch.bool else mask == 0
    seen = seen[:, None, None] if mask.dim() == 2 else seen
    lengths = seen[:, 0, -1].sum(dim=-1)
    shown = torch.arange(seen.shape[-1], device=seen.device) < lengths[:, None, None, None]
    band = shown & _band(seen, -1, 0) if causal and seen.shape[2] > 1 else shown
    if not bool((seen == band).all()):
        raise ValueError(
            f"attention_mask of shape {tuple(mask.shape)} hides other keys than padding on the "
            "right, and would be lost"
        )
    full = causal or bool((lengths == seen.shape[-1]).all())
    return None if full else lengths.tolist()


def _says_nothing(mask: Tensor, causal: bool, window: tuple[int, int] | None) -> bool:
    additive = mask.dim() == 4 and mask.dtype != torch.bool
    seen = mask == 0 if additive else mask != 0
    if mask.dim() == 2 or mask.shape[2] == 1:
        return bool(seen.all())
    plain = (-1, 0) if causal else (-1, -1)
    windows = [plain] if window is None else [plain, (window[0], plain[1] if causal else window[1])]
    return any(bool((seen == _band(seen, *sides)).all()) for sides in windows)


def _band(seen: Tensor, left: int, right: int) -> Tensor:
    """(rows, keys) bool, as transformers builds it: `left` and `right` of a row's own, -1 = all."""
    rows = torch.arange(seen.shape[2], device=seen.device)[:, None]
    keys = torch.arange(seen.shape[3], device=seen.device)[None]
    band = torch.ones_like(keys <= rows)
    band = band if left < 0 else band & (keys >= rows - left)
    return band if right < 0 else band & (keys <= rows + right)
