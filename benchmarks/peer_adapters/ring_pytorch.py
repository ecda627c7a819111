"""ring-attention-pytorch: the striped ring of its CPU path."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from ring_attention_pytorch import ring_flash_attn
from torch import Tensor

from peer_adapters import MakeScheme, Scheme, Setup

BUCKET_SIZE = 1024  # rows and keys of one block, the function's default


def schemes(setup: Setup) -> Mapping[str, MakeScheme]:
    """Striped attention on the default group."""
    return {"striped ring": partial(make, setup)}


def make(setup: Setup) -> Scheme:
    """The scheme; tokens go to the buckets in turn, as in the package's own module."""
    bucket = min(BUCKET_SIZE, setup.tokens // setup.size)
    order = torch.arange(setup.tokens).view(bucket, -1).t().flatten()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"ring_reduce_col": True, "striped_ring_attn": True, "ring_size": setup.size}
        return ring_flash_attn(q, k, v, causal=True, bucket_size=bucket, **options)

    return Scheme(order.chunk(setup.size)[setup.rank], attend)
