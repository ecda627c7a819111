"""The process groups, and the model parallel unit (mpu) through which DeepSpeed sees them.

DeepSpeed 0.19 averages gradients differently at each ZeRO stage if the mpu reports a
sequence-parallel size above 1 (their issue 6868, and docs/deepspeed.md). So this mpu reports the
whole world as one data-parallel group for gradients and states, a data-parallel size of world / P
for batch sizes and data, and sequence-parallel size 1. The loss is scaled to match (`handle.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from wf_backends.comm import as_timeout


@dataclass(frozen=True, slots=True)
class Groups:
    """This rank's process groups: the world, its sequence-parallel group, and this rank alone."""

    world: ProcessGroup
    sequence: ProcessGroup
    alone: ProcessGroup

    @classmethod
    def build(cls, sequence_parallel_size: int, timeout: float | None = None) -> Groups:
        """Build groups of consecutive ranks. Every rank of the world must call it.

        Args:
            timeout: seconds that ranks of a sequence wait for each other; None: as in the world.
        """
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError("torch.distributed is not initialised; call deepspeed.initialize")
        # Even for all ranks it is not the world itself: NCCL has one queue per group, and ZeRO's
        # collectives in the world would delay the messages of attention.
        sizes, group_timeout = sorted({1, sequence_parallel_size}), as_timeout(timeout, world)
        groups: Any = {size: dist.new_subgroups(size, timeout=group_timeout)[0] for size in sizes}
        return cls(world, groups[sequence_parallel_size], groups[1])


class NeutralMpu:
    """The methods of a model parallel unit that DeepSpeed calls.

    There is deliberately no `get_data_parallel_group`: ZeRO 3 would partition over that group and
    drop the gradients of the other sequence-parallel ranks.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    def initialize_sequence_parallel(self, *_: object, **__: object) -> None:
        """Does nothing; DeepSpeed takes an mpu without this method for a tensor-parallel unit."""

    def get_sequence_parallel_group(self) -> ProcessGroup:
        """The ranks that share one sequence."""
        return self.groups.sequence

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """The world: gradients are averaged and states partitioned over all ranks."""
        return self.groups.world

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_world_size(self) -> int:
        """The number of sequence-parallel groups, for batch sizes and samplers."""
        return dist.get_world_size() // dist.get_world_size(self.groups.sequence)

    def get_data_parallel_rank(self) -> int:
        """The number of this rank's sequence-parallel group, whose ranks read the same samples."""
        return dist.get_rank() // dist.get_world_size(self.groups.sequence)

    def get_model_parallel_group(self) -> ProcessGroup:
        """This rank alone: no parameter is split over ranks."""
        return self.groups.alone

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_pipeline_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_pipeline_model_parallel_world_size = get_model_parallel_world_size
    get_sequence_parallel_world_size = get_model_parallel_world_size
    """So that no ZeRO stage rescales gradients (see the module's docstring)."""
