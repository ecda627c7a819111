"""The state of a layer with a convolution and a recurrence, in generation over ranks.

Over the prompt a rank computes some channels or heads of the layer (families/mixing.py). A state
has the same size after any number of tokens. So every rank gathers that of all channels, and runs
the layer as it is on new tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils

from wf_backends import SequenceParallel
from wf_backends.runtime import gather_shards
from wf_backends.schedule import make_layout
from wf_transformers.families.shares import Share

CUT_LIKE = {"conv_states": "conv", "recurrent_states": "A_log"}
"""Attribute of transformers' layer of states -> part of the name of the parameter that is cut along
the same channels or heads; those of a state are its dim 1."""


class LayerState:
    """The state of one layer after `length` tokens; the methods are those of `KeyValueCache`.

    Attributes:
        cache: transformers' cache that has it, which the layer reads and writes.
    """

    def __init__(self, layer: Any) -> None:
        utils: Any = cache_utils  # transformers 4 has no such layers
        self.length, self._own = 0, utils.LinearAttentionLayer()
        self.cache = utils.Cache(layers=[self._own] * (layer.layer_idx + 1))

    @property
    def nbytes(self) -> int:
        return sum(states[0].nbytes for states, _ in self._states())

    def keep(self, sp: SequenceParallel, shares: Sequence[Share], length: int) -> None:
        """Gather the state after a prompt of `length` tokens, of which a rank's `cache` has a part,
        by the shares of all ranks. Groups of channels that several ranks have are equal there."""
        for states, part in self._states():
            state = states[0]
            layout = make_layout("contiguous", sp.size, sp.size * state.shape[1])
            gathered = gather_shards(sp.comm, layout, 1, state, "states")
            index = torch.cat([_indices(share, part) for share in shares])
            whole = state.new_empty((len(state), int(index.max()) + 1, *state.shape[2:]))
            states[0] = whole.index_copy_(1, index, gathered)
        self.length = length

    def run(self, layer: nn.Module, x: Tensor, key: str) -> Any:
        """The layer's own forward over new tokens (b, n, width), the same on every rank; its
        parameter `key` takes the cache."""
        self.length += x.shape[1]
        return type(layer).forward(layer, x, **{key: self.cache})

    def take_samples(self, samples: Tensor) -> None:
        for states, _ in self._states():
            states[0] = states[0].index_select(0, samples.to(states[0].device))

    def check_crop(self, length: int) -> None:
        """Raise a ValueError if some of the tokens would have to be taken back."""
        if 0 < length < self.length:
            raise ValueError(
                f"crop({length}): the state of a convolution or recurrence after {self.length} "
                "tokens does not tell the one after fewer; keep all tokens, or none"
            )

    def crop(self, length: int) -> None:
        if length == 0:
            self._own.reset()
        self.length = length

    def _states(self) -> Iterator[tuple[dict[int, Tensor], str]]:
        """The dictionaries of transformers with one state each, at key 0, and its `CUT_LIKE`."""
        for name, part in CUT_LIKE.items():
            states = getattr(self._own, name)
            if states[0] is not None:  # a layer without a recurrence has none
                yield states, part


def has_state(layer: nn.Module) -> bool:
    """Whether the layer keeps its state in transformers' cache, as it does since 5.24."""
    return hasattr(cache_utils.Cache, "get_conv_state") and hasattr(layer, "layer_idx")


def _indices(share: Share, part: str) -> Tensor:
    return next(index for name, (_, index) in share.parameters.items() if part in name)
