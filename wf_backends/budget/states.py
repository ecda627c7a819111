"""Parameters, gradients and optimizer states of one rank, as DeepSpeed's ZeRO holds them.

Pure: standard library only. Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 3, and what
DeepSpeed 0.19 allocates beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from wf_backends.budget.model import Decoder

STAGES = (0, 1, 2, 3)
WIDE = 4  # bytes of a master weight, of each of Adam's two averages, of a gradient at the step
ADAM = 3 * WIDE
SUB_GROUP = 10**9  # parameters that ZeRO 3 steps at a time: "sub_group_size"


@dataclass(frozen=True, slots=True)
class Buckets:
    """Elements of DeepSpeed's buffers, by the keys of "zero_optimization"; its defaults."""

    reduce_bucket_size: int = 5 * 10**8
    """Gradients that are reduced at a time, from ZeRO 1 on."""
    stage3_max_live_parameters: int = 10**9
    """Gathered parameters that stay, under ZeRO 3."""
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
        """The most of a training step: max(backward + activations, at_step)."""
        return max(self.backward + activations, self.at_step)


def states(model: Decoder, stage: int, ranks: int, buckets: Buckets | None = None) -> States:
    """The model's states under ZeRO, by Adam with float32 master weights.

        stage   parameters  gradients  optimizer  step
        0       e p         e p        12 p       (e + 4) p
        1       e p         e p        12 p / N   (2 e + 4) p / N
        2       e p         e p / N    12 p / N   (2 e + 4) p / N
        3       e p / N     e p / N    12 p / N   (2 e + 4) p / N

    for p parameters of e bytes on N ranks; at stage 0 float32 parameters need no master weights.

    Args:
        stage: of ZeRO, 0 to 3.
        ranks: those that share the states: all of the job, whose sequence-parallel groups count as
            data parallelism here.
    """
    size, all_of_it = model.itemsize, float(model.parameters)
    sizes, part = buckets or Buckets(), model.parameters / ranks
    if stage == 0:
        optimizer = (ADAM if size < WIDE else ADAM - WIDE) * all_of_it
        wide = WIDE * all_of_it if size < WIDE else 0.0
        return States(size * all_of_it, size * all_of_it, optimizer, 0.0, size * all_of_it + wide)
    bucket = float(size * sizes.reduce_bucket_size)
    if stage < 3:
        gradients, step = size * (all_of_it if stage == 1 else part), (2 * size + WIDE) * part
        return States(size * all_of_it, gradients, ADAM * part, bucket, step)
    module = model.experts.weights(model.hidden) if model.experts else 0  # gathered as a whole
    live = min(model.parameters, max(sizes.stage3_max_live_parameters, module))
    arriving = min(model.parameters, sizes.stage3_prefetch_bucket_size)
    step = size * part + (size + WIDE) * min(part, SUB_GROUP)
    return States(size * part, size * part, ADAM * part, bucket + size * (live + arriving), step)
