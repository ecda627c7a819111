"""Tensor parallelism (`parallelize_module`, transformers' plans) beside ours: over other ranks.

mesh (sp, tp): ranks of "tp" hold parts of every weight and the same tokens, ranks of "sp" share
the tokens of a sequence
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

TENSOR = "tp"  # what torchtitan, accelerate and transformers call the dimension of a mesh


def check_tensor_parallel(model: nn.Module, handle: Handle) -> None:
    """Refuse a model whose tensor-parallel ranks hold different tokens: now, and at its first call.

    Raises:
        ValueError: naming a weight and the ranks.
    """
    refuse_shared_ranks(model, handle.sp)

    @eager
    def check(called: nn.Module, *_: Any) -> None:
        refuse_shared_ranks(called, handle.sp)
        hook.remove()

    hook = model.register_forward_pre_hook(check)
    handle.hooks(hook)


def refuse_shared_ranks(model: nn.Module, sp: SequenceParallel) -> None:
    """As `check_tensor_parallel`. FSDP's parts of a weight may lie on the ranks of a sequence."""
    others = {rank for at, rank in enumerate(sp.comm.global_ranks) if at != sp.rank}
    by_fsdp = any(isinstance(module, FSDPModule) for module in model.modules())
    for name, weight in model.named_parameters():
        if not isinstance(weight, DTensor):
            continue
        mesh = weight.device_mesh
        names = mesh.mesh_dim_names or [""] * mesh.ndim
        for at, placement in enumerate(weight.placements):
            if placement.is_replicate() or by_fsdp and names[at] != TENSOR:
                continue
            ranks = dist.get_process_group_ranks(mesh.get_group(at))
            if others & {*ranks}:
                raise ValueError(
                    f"{name} is in parts on the ranks {ranks}, and ranks "
                    f"{[*sp.comm.global_ranks]} share a sequence: ranks of tensor parallelism must "
                    "have the same tokens. Give SequenceParallel the group of another dimension of "
                    'the mesh, as mesh["sp"].get_group() of a mesh ("sp", "tp")'
                )
