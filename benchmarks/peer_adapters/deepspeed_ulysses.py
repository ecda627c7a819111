"""DeepSpeed Ulysses: `DistributedAttention` around torch's attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from layers import torch_attention
from torch import Tensor

from peer_adapters import Make, Place, Scheme
from wf_deepspeed.cpu import without_shared_memory_op


def schemes(place: Place) -> Mapping[str, Make]:
    """Heads for tokens over all ranks."""
    return {f"Ulysses {place.size}": partial(make, place)}


def make(place: Place) -> Scheme:
    """DeepSpeed finds the group that is initialised already."""
    deepspeed.logger.setLevel("WARNING")
    with without_shared_memory_op():
        deepspeed.init_distributed("gloo", verbose=False)
    causal: Any = partial(torch_attention, causal=True)
    ulysses = DistributedAttention(causal, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ulysses(q, k, v, 0)

    return Scheme(place.contiguous(), attend)
