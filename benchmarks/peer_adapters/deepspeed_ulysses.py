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

from peer_adapters import MakeScheme, Scheme, Setup
from wf_deepspeed.cpu import without_shared_memory_op


def schemes(setup: Setup) -> Mapping[str, MakeScheme]:
    """Ulysses over all ranks."""
    return {f"Ulysses {setup.size}": partial(make, setup)}


def make(setup: Setup) -> Scheme:
    """The scheme; DeepSpeed uses the process group that exists already."""
    deepspeed.logger.setLevel("WARNING")
    with without_shared_memory_op():
        deepspeed.init_distributed("gloo", verbose=False)
    local_attention: Any = partial(torch_attention, causal=True)
    ulysses = DistributedAttention(local_attention, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ulysses(q, k, v, 0)

    return Scheme(setup.contiguous(), attend)
