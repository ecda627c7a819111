"""Random numbers of a model whose tokens are on several ranks: dropout, and NEFTune's noise."""

from __future__ import annotations

import random
from contextlib import ExitStack
from math import sqrt
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers.configuration_utils import PretrainedConfig

from wf_backends import SequenceParallel
from wf_transformers.replace import set_until

NEFTUNE = "neftune_noise_alpha"
HEADS = ("classifier", "summary")  # prefixes of config fields of pooling heads: not on parts


def uses_rng_in_training(model: nn.Module) -> bool:
    """Whether a module or its config has dropout or jitter, or an embedding has noise."""
    return any(_uses_rng(module) for module in model.modules())


def _uses_rng(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    config = vars(module).get("config")
    fields = vars(config) if isinstance(config, PretrainedConfig) else {}
    probabilities = (
        value
        for key, value in fields.items()
        if ("drop" in key or "jitter" in key) and not key.startswith(HEADS)
    )
    return NEFTUNE in vars(module) or any(isinstance(p, float) and p > 0 for p in probabilities)


class RankRng:
    """Gives each rank a random state of its own between `enter` and `leave`.

    Outside, the ranks of a sequence have the same state, so that they hold the same model and
    batch; inside they would drop the same elements of different tokens. A rank's seed follows from
    the common state. If anything was drawn inside, `leave` advances the common state by one draw.
    """

    def __init__(self, sp: SequenceParallel) -> None:
        self._sp = sp
        self._saved: list[tuple[Generator, Tensor, Tensor]] = []
        """(generator, common state, this rank's initial state)."""

    def enter(self, model: nn.Module, device: torch.device) -> None:
        """Seed the generators of the host and of `device` for this rank, if there are several ranks
        and the forward of `model` uses random numbers."""
        if self._sp.size == 1 or not model.training or not uses_rng_in_training(model):
            return
        for generator in generators_of(device):
            common_state = generator.get_state()
            seed = crc32(common_state.numpy().tobytes() + self._sp.rank.to_bytes(4))
            generator.manual_seed(seed)
            self._saved.append((generator, common_state, generator.get_state()))

    def leave(self, *_: Any) -> None:
        """Restore the common state. A second call does nothing."""
        while self._saved:
            generator, common_state, initial_state = self._saved.pop()
            was_used = not torch.equal(generator.get_state(), initial_state)
            generator.set_state(common_state)
            if was_used:
                torch.empty(1, device=generator.device).uniform_(generator=generator)


def generators_of(device: torch.device) -> list[Generator]:
    """torch's default generators of the host and of `device`."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators


def draw_alike(size: int, device: torch.device) -> None:
    """Have the ranks of each group go on with the random numbers of its first rank: those of torch
    on the host and on `device`, of Python and of NumPy. Collective over the default group.

    Args:
        size: the number of ranks in a group of consecutive ranks.
    """
    generators = generators_of(device)
    states = [x.get_state() for x in generators], random.getstate(), np.random.get_state()
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, states)
    torch_states, python_state, numpy_state = by_rank[dist.get_rank() // size * size]
    for generator, state in zip(generators, torch_states, strict=True):
        generator.set_state(state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)


def scale_noise(undo: ExitStack, model: nn.Module, local_seqlen: int, seqlen: int) -> None:
    """Scale NEFTune's noise on `local_seqlen` tokens to that of all `seqlen`, until `undo` closes.

    The noise is uniform within alpha / sqrt(seqlen x width), with the seqlen that the embedding
    sees. Source: Jain et al. 2023, arXiv 2310.05914, as transformers' Trainer has it.
    """
    for module in model.modules():
        alpha: Any = vars(module).get(NEFTUNE)
        if alpha is not None:
            set_until(undo, module, NEFTUNE, alpha * sqrt(local_seqlen / seqlen))
