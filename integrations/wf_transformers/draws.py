"""Random draws of a model whose tokens are on several ranks: dropout, and the noise of NEFTune."""

from __future__ import annotations

from math import sqrt
from typing import Any
from zlib import crc32

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers.configuration_utils import PretrainedConfig

from wf_backends import SequenceParallel

NEFTUNE = "neftune_noise_alpha"
HEADS = ("classifier", "summary")  # of configs' names: heads that pool, which are not spread


def draws_in_training(model: nn.Module) -> bool:
    """Whether a module or its config asks for dropout or jitter, or an embedding for noise."""
    return any(_draws(module) for module in model.modules())


def _draws(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    config = getattr(module, "config", None)
    words = vars(config) if isinstance(config, PretrainedConfig) else {}
    drawn = (
        value
        for key, value in words.items()
        if ("drop" in key or "jitter" in key) and not key.startswith(HEADS)
    )
    return NEFTUNE in vars(module) or any(isinstance(p, float) and p > 0 for p in drawn)


class RankDraws:
    """Between `enter` and `leave` every rank draws for itself, and all alike before and after.

    Ranks of a sequence are seeded alike, so that they hold the same model and batch. With one seed
    they would drop the same elements of different tokens. The seeds of the ranks follow from the
    common state, which goes on by one draw where anything was drawn.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outer: list[tuple[Generator, Tensor, Tensor]] = []

    def enter_for(self, model: nn.Module, sp: SequenceParallel, device: torch.device) -> None:
        """`enter` before a forward that draws, of tokens that are on several ranks."""
        if sp.size > 1 and model.training and draws_in_training(model):
            self.enter(device)

    def enter(self, device: torch.device) -> None:
        """Seed the generators of the host and of `device` by this rank."""
        for generator in _generators(device):
            state = generator.get_state()
            drawn_from = state.numpy().tobytes() + self._rank.to_bytes(4)
            generator.manual_seed(crc32(drawn_from))
            self._outer.append((generator, state, generator.get_state()))

    def leave(self, *_: Any) -> None:
        """Back to the common state. A second call does nothing."""
        while self._outer:
            generator, state, begun = self._outer.pop()
            drew = not torch.equal(generator.get_state(), begun)
            generator.set_state(state)
            if drew:
                torch.empty(1, device=generator.device).uniform_(generator=generator)


def _generators(device: torch.device) -> list[Generator]:
    found = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index or 0])
    return found


class WholeNoise:
    """NEFTune's noise as large as for the whole sequence.

    It is uniform within alpha / sqrt(length x width), of the length that an embedding sees.
    Source: Jain et al. 2023, arXiv 2310.05914, as transformers' Trainer has it.
    """

    def __init__(self) -> None:
        self._alphas: list[tuple[nn.Module, float]] = []

    def enter(self, model: nn.Module, local: int, whole: int) -> None:
        """For a call with `local` of `whole` tokens, until `leave`."""
        for module in model.modules():
            alpha: Any = vars(module).get(NEFTUNE)
            if alpha is not None:
                self._alphas.append((module, alpha))
                setattr(module, NEFTUNE, alpha * sqrt(local / whole))

    def leave(self) -> None:
        """As before. A second call does nothing."""
        while self._alphas:
            module, alpha = self._alphas.pop()
            setattr(module, NEFTUNE, alpha)
