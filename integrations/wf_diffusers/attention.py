"""Makes attention modules of diffusers call `sp.attention` instead of torch's attention.

Shapes: b batch, h query heads, g key and value heads, s rows of this rank, d head_dim.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor

from wf_backends import SequenceParallel
from wf_transformers import Handle, InPlaceOfTorchAttention
from wf_transformers.attention.function import as_autocast

BACKEND = "_attention_backend"  # attribute of processors that use diffusers' registry of backends


class TorchAttention:
    """`sp.attention` with the signature of torch's `scaled_dot_product_attention`."""

    def __init__(self, sp: SequenceParallel, masks_are_true: bool = False) -> None:
        self.sp, self.masks_are_true = sp, masks_are_true
        self.calls = 0
        """How often it was called."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return exact attention (b, h, s, d) of this rank's query rows over the whole sequence;
        key and value are (b, g, s, d), where g divides h."""
        if attn_mask is not None and not self.masks_are_true:
            raise NotImplementedError(
                f"an attention mask {tuple(attn_mask.shape)} covers the whole sequence, and a rank "
                "has only some of its rows: leave the mask out, do not pad the text, and give "
                "samples with texts of different lengths in calls of their own"
            )
        if is_causal:
            raise NotImplementedError(
                "causal attention is not supported: tokens are not in order over the ranks"
            )
        self.calls += 1
        q, k, v = (as_autocast(x).transpose(1, 2) for x in (query, key, value))
        return self.sp.attention(q, k, v, softmax_scale=scale, dropout_p=dropout_p).transpose(1, 2)


def take_over(module: Any, attention: TorchAttention, handle: Handle) -> None:
    """Make an attention module call `attention` where diffusers' native backend calls torch's.

    Its forward raises a NotImplementedError if it calls neither.
    """
    if hasattr(module.processor, BACKEND):
        handle.set(module.processor, BACKEND, AttentionBackendName.NATIVE)
    original = module.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        calls = attention.calls
        with InPlaceOfTorchAttention(attention):
            out = original(*args, **kwargs)
        if attention.calls == calls and not kwargs.get("all_perturbed"):  # LTX 2 then takes values
            raise NotImplementedError(
                f"{type(module).__name__} did not call WallFacer's attention. Processors or "
                "backends were changed after wf_diffusers.attach (set them before), or call other "
                "attention than torch's (finetrainers' --attn_provider_training: leave it out), or "
                "a cache that skips attention was enabled before attach (enable it after)"
            )
        return out

    handle.set(module, "forward", forward)
