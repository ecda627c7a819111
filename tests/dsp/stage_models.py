"""A model of residual stages over three dimensions, and a training step of it under a tracker."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wf_backends.dsp.layout_tracker import LayoutTracker
from wf_backends.dsp.stages import Stages
from wf_backends.dsp.switch import DynamicSequenceParallel
from wf_backends.parallel.gradients import GradientMean

DIMS = {"rows": 1, "columns": 2, "layers": 3}
ORDERS = [
    (("rows", "columns", "rows", "columns"), 3),
    (("rows", "rows", "columns", "columns", "layers"), 1),
    (("layers", "columns", "rows"), 1),
    (("columns", "columns", "columns"), 0),
]
"""(the dimension that each stage needs, the fewest switches): a stage that needs the sharded
dimension takes a switch, to the dimension that is needed last."""


class Mix(nn.Module):
    """A residual stage that needs one dimension of (b, rows, columns, layers, 3) whole."""

    def __init__(self, dim):
        super().__init__()
        self.dim, self.linear = dim, nn.Linear(3, 3)

    def forward(self, x, scale=1.0):
        return x + scale * (self.linear(x).cumsum(self.dim) / x.shape[self.dim]).tanh()


class Model(nn.Module):
    """Stages in the given order between two pointwise layers."""

    def __init__(self, order, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.stages = nn.ModuleList(Mix(DIMS[dim]) for dim in order)

    def forward(self, x):
        x = self.first(x)
        for stage in self.stages:
            if self.checkpointed:
                x = checkpoint(stage, x, use_reentrant=False)
            else:
                x = stage(x, scale=1.0)
        return self.last(x).sin()


def stages_of(order, **changes: Any) -> Stages:
    """The stages of a `Model`, cut first along a dimension that its first stage does not need."""
    start = next(dim for dim in DIMS if dim != order[0]) if order else None
    keys = {"dims": DIMS, "enters": "stages.0", "starts_along": start, "leaves": "last"}
    keys["needs"] = {f"stages.{i}": dim for i, dim in enumerate(order)}
    return Stages(**{**keys, **changes})


def filled(model: nn.Module) -> nn.Module:
    """The model in float64, with the same drawn parameters at each call."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=random, dtype=p.dtype))
    return model.double()


def drawn_input() -> Tensor:
    """5 rows, 7 columns and 3 layers: no multiple of most numbers of ranks."""
    return torch.randn(2, 5, 7, 3, 3, generator=torch.Generator().manual_seed(1)).double()


def step_on_one_device(order) -> tuple[Tensor, list[Tensor]]:
    """(output, gradients) of a training step."""
    model = filled(Model(order))
    out = model(drawn_input())
    out.square().mean().backward()
    return out, [p.grad for p in model.parameters()]


def step_under_tracker(comm, order, checkpointed) -> tuple[Tensor, list[Tensor], float]:
    """(output, gradients, switches) of the second of two training steps on a rank.

    The first one leaves nothing behind that changes the second.
    """
    model, x = filled(Model(order, checkpointed)), drawn_input()
    dsp = DynamicSequenceParallel(comm, gradients="averaged")
    tracker = LayoutTracker(model, dsp, stages_of(order))
    for _ in range(2):
        model.zero_grad()
        out = model(x)
        out.square().mean().backward()
    GradientMean(comm)(model.parameters())
    return out, [p.grad for p in model.parameters()], tracker.switches / 2
