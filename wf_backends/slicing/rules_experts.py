"""The rule for a layer's experts, which are one operator: each token's result is its own.

    y_t = sum over the experts e that token t chose of w_te f_e(x_t)

Their operators sort the tokens of a call by expert, so none of these could be sliced by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from wf_backends.slicing.call import Call, Reads, Rows, Rule


@dataclass(frozen=True, eq=False)
class Experts:
    """The call of a module that computes a layer's experts, its parameters among the arguments.

    Modules of layers that are alike share one; `number` tells it from others of the same graph.

    Args:
        weights: the names of its parameters and buffers.
    """

    module: nn.Module
    weights: tuple[str, ...]
    number: int

    @property
    def __name__(self) -> str:
        return f"experts_{self.number}"

    def __str__(self) -> str:
        return self.__name__

    def __call__(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        weights: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """(t, h) for (t, h), (t, k) and (t, k)."""
        own = dict(zip(self.weights, weights, strict=True))
        given = hidden_states, top_k_index, top_k_weights
        return torch.func.functional_call(self.module, own, given, tie_weights=False)


def _tokens(call: Call, dim: int) -> Reads | None:
    sizes = {name: call.size(name) for name in call.tensors()}
    flat = all(len(size) == 2 and size[0] == call.shape[0] for size in sizes.values())
    return dict.fromkeys(sizes, Rows(0)) if flat and dim == 0 else None


EXPERTS = Rule(_tokens)
