"""Parameters, gradients and optimizer states of one rank, as DeepSpeed's ZeRO holds them.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 3, and the buffers that DeepSpeed 0.19
allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

from wf_backends.budget.model import Decoder

STAGES = (0, 1, 2, 3)
FP32_BYTES = 4  # of a master weight, of each of Adam's two averages, of a gradient at the step
ADAM_BYTES = 3 * FP32_BYTES  # a parameter: master weight and averages
SUB_GROUP_SIZE = 10**9  # parameters that ZeRO 3 updates at a time, DeepSpeed's "sub_group_size"


@dataclass(frozen=True, slots=True)
class Buckets:
    """Elements of DeepSpeed's buffers, by the keys of "zero_optimization"; its defaults."""

    reduce_bucket_size: int = 5 * 10**8
    """Gradients reduced at a time, from ZeRO 1 on."""
    stage3_max_live_parameters: int = 10**9
    """Gathered parameters that stay in memory, under ZeRO 3."""
    stage3_prefetch_bucket_size: int = 5 * 10**7
    """Parameters gathered at a time, under ZeRO 3."""


@dataclass(frozen=True, slots=True)
class States:
    """Bytes on one rank."""

    parameters: float
    gradients: float
    """While the backward runs."""
    optimizer: float
    buffers: float
    """Buckets of gradients and gathered parameters, while the backward runs."""
    step: float
    """At the optimizer's step, in place of gradients, buffers and activations."""

    @property
    def backward(self) -> float:
        """All but activations while the backward runs."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def at_step(self) -> float:
        """All at the optimizer's step."""
        return self.parameters + self.optimizer + self.step

    def peak(self, activations: float) -> float:
        """The peak of a training step: max(backward + activations, at_step)."""
        return max(self.backward + activations, self.at_step)


def states(model: Decoder, stage: int, ranks: int, buckets: Buckets) -> States:
    """The model's states under ZeRO, with Adam and float32 master weights.

        stage   parameters  gradients  optimizer  step
        0       e p         e p        12 p       (e + 4) p
        1       e p         e p        12 p / N   (2 e + 4) p / N
        2       e p         e p / N    12 p / N   (2 e + 4) p / N
        3       e p / N     e p / N    12 p / N   e p / N + (e + 4) min(p / N, SUB_GROUP_SIZE)

    for p parameters of e bytes on N ranks; at stage 0 float32 parameters need no master weights.

    Args:
        stage: of ZeRO, 0 to 3.
        ranks: all ranks of the job share the states: for ZeRO the ranks of a sequence-parallel
            group are data parallel, too.
    """
    itemsize, whole, shard = model.itemsize, float(model.parameters), model.parameters / ranks
    parameters = itemsize * (shard if stage == 3 else whole)
    gradients = itemsize * (shard if stage >= 2 else whole)
    if stage == 0:
        has_masters = itemsize < FP32_BYTES  # else the parameters are the master weights
        optimizer = (ADAM_BYTES if has_masters else ADAM_BYTES - FP32_BYTES) * whole
        step = gradients + (FP32_BYTES * whole if has_masters else 0.0)
        return States(parameters, gradients, optimizer, 0.0, step)
    updated, buffers = shard, float(itemsize * buckets.reduce_bucket_size)
    if stage == 3:
        # the experts of a layer are gathered as a whole
        live = min(model.parameters, max(buckets.stage3_max_live_parameters, model.expert_weights))
        prefetched = min(model.parameters, buckets.stage3_prefetch_bucket_size)
        updated, buffers = min(shard, SUB_GROUP_SIZE), buffers + itemsize * (live + prefetched)
    step = itemsize * shard + (itemsize + FP32_BYTES) * updated
    return States(parameters, gradients, ADAM_BYTES * shard, buffers, step)
