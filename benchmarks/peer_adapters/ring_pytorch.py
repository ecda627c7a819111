"""ring-attention-pytorch: the striped ring of its CPU path."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from ring_attention_pytorch import ring_flash_attn
from torch import Tensor

from peer_adapters import Make, Place, Scheme

BUCKET = 1024  # rows and keys of one block, the function's default


def schemes(place: Place) -> Mapping[str, Make]:
    """Striped attention on the default group."""
    return {"striped ring": partial(make, place)}


def make(place: Place) -> Scheme:
    """Its module deals tokens to buckets in turn; buckets stay in order."""
    bucket = min(BUCKET, place.tokens // place.size)
    dealt = torch.arange(place.tokens).view(bucket, -1).t().flatten()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        words = {"ring_reduce_col": True, "striped_ring_attn": True, "ring_size": place.size}
        return ring_flash_attn(q, k, v, causal=True, bucket_size=bucket, **words)

    return Scheme(dealt.chunk(place.size)[place.rank], attend)
