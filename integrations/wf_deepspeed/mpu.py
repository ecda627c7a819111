"""The groups DeepSpeed is shown: a model parallel unit that changes nothing about its gradients.

DeepSpeed 0.19 averages gradients differently at every ZeRO stage as soon as it is told of a
sequence-parallel size above 1 (their issue 6868, and docs/deepspeed.md). So it is told of the
whole world as one data-parallel group for gradients and states, of world / P for batch
arithmetic and data, and of sequence-parallel size 1. What the loss is worth is then up to us.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from wf_backends.comm import as_timeout


@dataclass(frozen=True, slots=True)
class Groups:
    """This rank's process groups: its sequence-parallel block of consecutive ranks, and itself."""

    world: ProcessGroup
    sequence: ProcessGroup
    alone: ProcessGroup

    @classmethod
    def build(cls, sequence_parallel_size: int, timeout: float | None = None) -> Groups:
        """Cut the world into blocks of consecutive ranks. Every rank must call it.

        Args:
            timeout: seconds that ranks of a sequence wait for each other; None = as in the world.

        Raises:
            RuntimeError: if torch.distributed is not initialised.
        """
        world = dist.group.WORLD
        if world is None:
            raise RuntimeError("torch.distributed is not initialised; call deepspeed.initialize")
        wait = as_timeout(timeout, world)
        alone, size = _block_of(1, wait), sequence_parallel_size
        return cls(world, alone if size == 1 else _block_of(size, wait), alone)


def _block_of(size: int, timeout: timedelta | None) -> ProcessGroup:
    """This rank's block of `size` consecutive ranks of the world.

    Never the world itself: NCCL has one queue for each group, and what ZeRO gathers and reduces in
    the world would hold up the messages of attention.
    """
    block, _ = dist.new_subgroups(size, timeout=timeout)
    assert isinstance(block, ProcessGroup), "every rank of the world is in one block"
    return block


class NeutralMpu:
    """What DeepSpeed asks a model parallel unit for.

    There is deliberately no `get_data_parallel_group`: with it ZeRO 3 partitions over it and
    drops the sequence-parallel ranks' gradients.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    def initialize_sequence_parallel(self, *_: object, **__: object) -> None:
        """Nothing to do; that it exists tells DeepSpeed that this is no tensor-parallel unit."""

    def get_sequence_parallel_group(self) -> ProcessGroup:
        """The ranks that share one sequence."""
        return self.groups.sequence

    def get_sequence_parallel_rank(self) -> int:
        """This rank inside its sequence-parallel group."""
        return dist.get_rank(self.groups.sequence)

    def get_sequence_parallel_world_size(self) -> int:
        """1: no stage of ZeRO is to rescale gradients (see the head of this module)."""
        return 1

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """Gradients are averaged and states are partitioned over the whole world."""
        return self.groups.world

    def get_sequence_data_parallel_world_size(self) -> int:
        """The world size."""
        return dist.get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        """The rank in the world."""
        return dist.get_rank()

    def get_data_parallel_world_size(self) -> int:
        """How many sequence-parallel groups there are: what batch sizes and samplers count."""
        return dist.get_world_size() // dist.get_world_size(self.groups.sequence)

    def get_data_parallel_rank(self) -> int:
        """Which of them this rank is in: all its ranks read the same samples."""
        return dist.get_rank() // dist.get_world_size(self.groups.sequence)

    def get_model_parallel_group(self) -> ProcessGroup:
        """This rank alone: no parameter is split."""
        return self.groups.alone

    def get_model_parallel_world_size(self) -> int:
        """1."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """0."""
        return 0

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_pipeline_model_parallel_group = get_model_parallel_group
    get_pipeline_model_parallel_world_size = get_model_parallel_world_size
    get_pipeline_model_parallel_rank = get_model_parallel_rank
