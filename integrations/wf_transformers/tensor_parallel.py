"""Checks that tensor parallelism (`parallelize_module`, transformers' plans) uses other ranks.

In a mesh ("sp", "tp"), ranks of "tp" hold parts of every weight and have the same tokens; ranks of
"sp" share the tokens of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from wf_backends import SequenceParallel
from wf_backends._compile import eager
from wf_transformers.handle import Handle

TENSOR_PARALLEL = "tp"  # the mesh dimension's name in torchtitan, accelerate and transformers


def check_tensor_parallel(model: nn.Module, handle: Handle) -> None:
    """Refuse a model whose tensor-parallel ranks have other tokens, now and at its first call."""
    refuse_shared_ranks(model, handle.sp)

    @eager
    def check(called: nn.Module, *_: Any) -> None:
        refuse_shared_ranks(called, handle.sp)
        hook.remove()

    hook = handle.before(model, check)


def refuse_shared_ranks(model: nn.Module, sp: SequenceParallel) -> None:
    """`check_tensor_parallel`, now. FSDP may shard weights over the ranks of a sequence."""
    other_ranks = {*sp.comm.global_ranks} - {sp.comm.global_ranks[sp.rank]}
    has_fsdp = any(isinstance(module, FSDPModule) for module in model.modules())
    for name, weight in model.named_parameters():
        if not isinstance(weight, DTensor):
            continue
        mesh = weight.device_mesh
        names = mesh.mesh_dim_names or [""] * mesh.ndim
        for dim, placement in enumerate(weight.placements):
            is_fsdp = has_fsdp and names[dim] != TENSOR_PARALLEL
            if placement.is_replicate() or is_fsdp:
                continue
            ranks = dist.get_process_group_ranks(mesh.get_group(dim))
            if other_ranks & {*ranks}:
                raise ValueError(
                    f"{name} is in parts on the ranks {ranks}, and ranks "
                    f"{[*sp.comm.global_ranks]} share a sequence: ranks of tensor parallelism must "
                    "have the same tokens. Give SequenceParallel the group of another dimension of "
                    'the mesh, as mesh["sp"].get_group() of a mesh ("sp", "tp")'
                )
