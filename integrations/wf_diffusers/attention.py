"""What attention modules of diffusers get where they ask for torch's attention."""

from __future__ import annotations

from functools import wraps
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor

from wf_backends import SequenceParallel
from wf_transformers import Handle, InPlaceOfTorchAttention

BACKEND = "_attention_backend"  # of a processor that asks the registry of backends


class Attention:
    """sp.attention in the words of torch's `scaled_dot_product_attention`."""

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp = sp
        self.calls = 0
        """Since somebody last set this to 0."""

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
        """Exact attention of this rank's rows over the whole sequence.

        Args:
            query: (b, h, s, d), this rank's rows. key, value: (b, g, s, d), g divides h.

        Returns:
            (b, h, s, d).

        Raises:
            NotImplementedError: for a mask, causal or not.
        """
        if attn_mask is not None:
            raise NotImplementedError(
                f"an attention mask {tuple(attn_mask.shape)} would be of the whole sequence: "
                "leave it out, and padded text with it"
            )
        if is_causal:
            raise NotImplementedError("causal attention: ranks have tokens from anywhere")
        self.calls += 1
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self.sp.attention(q, k, v, softmax_scale=scale, dropout_p=dropout_p).transpose(1, 2)


def take_over(module: Any, attention: Attention, handle: Handle) -> None:
    """Have an attention module call `attention` in place of torch's, whatever its backend was."""
    if hasattr(module.processor, BACKEND):
        handle.set(module.processor, BACKEND, AttentionBackendName.NATIVE)
    own = module.forward

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with InPlaceOfTorchAttention(attention):
            return own(*args, **kwargs)

    handle.set(module, "forward", forward)
