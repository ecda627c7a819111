"""DeepSpeed Ulysses: `DistributedAttention` around torch's attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import deepspeed
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor

from peer_adapters import Make, Place, Scheme
from peer_adapters.layouts import contiguous
from wf_deepspeed.cpu import without_shared_memory_op


def schemes(place: Place) -> Mapping[str, Make]:
    """Heads for tokens over all ranks."""
    return {f"Ulysses {place.size}": partial(make, place)}


def make(place: Place) -> Scheme:
    """DeepSpeed finds the group that is initialised already."""
    deepspeed.logger.setLevel("WARNING")
    with without_shared_memory_op():
        deepspeed.init_distributed("gloo", verbose=False)
    ulysses = DistributedAttention(here, dist.group.WORLD, scatter_idx=2, gather_idx=1)  # type: ignore

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ulysses(q, k, v, 0)

    return Scheme(contiguous(place), attend)


def here(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the whole sequence and this rank's heads, (b, S, h, d)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
