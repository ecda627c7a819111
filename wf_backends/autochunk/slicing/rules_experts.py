"""The rule for a layer's experts, which are one operator of the graph and are sliced by tokens.

    y_t = sum of w_te f_e(x_t) over the experts e of token t

The operators inside sort all tokens by expert, so that none of them could be sliced by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from wf_backends.autochunk.slicing.call import Call, Reads, Rows, Rule


@dataclass(frozen=True, eq=False)
class Experts:
    """A module that computes a layer's experts, as a function that gets its parameters as inputs.

    Identical layers of a graph share one instance; `number` distinguishes the instances. `weights`
    are the names of the module's parameters and buffers.
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
        """(tokens, hidden), of inputs of shapes (tokens, hidden), (tokens, k) and (tokens, k)."""
        parameters = dict(zip(self.weights, weights, strict=True))
        inputs = hidden_states, top_k_index, top_k_weights
        return torch.func.functional_call(self.module, parameters, inputs, tie_weights=False)


def experts_reads(call: Call, dim: int) -> Reads | None:
    """Sliced along tokens, where all three inputs are matrices with a row for each token."""
    sizes = {name: call.size(name) for name in call.tensors()}
    flat = all(len(size) == 2 and size[0] == call.shape[0] for size in sizes.values())
    return dict.fromkeys(sizes, Rows(0)) if flat and dim == 0 else None


EXPERTS = Rule(experts_reads)
