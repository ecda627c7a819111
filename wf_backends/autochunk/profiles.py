"""A plan with the memory of every operator, for models that are only looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from wf_backends.autochunk.cost import Rates
from wf_backends.autochunk.lower import Profile, lower
from wf_backends.autochunk.planning import Planned, find_plan
from wf_backends.graph import Effects, bind, checked_budget, register_containers


@dataclass(frozen=True)
class Profiles(Planned):
    """A plan, and the live bytes of activations at each operator with its module's path: `before`
    as the model is, `after` with a chunk region as one operator."""

    @cached_property
    def before(self) -> Profile:
        return lower(self.captured.graph, (), Effects()).profile

    @property
    def after(self) -> Profile:
        return self.lowered.profile if self.plan.regions else self.before


def memory_profiles(
    model: nn.Module,
    kwargs: Mapping[str, Any],
    max_memory: int | float | str | None = None,
    max_slowdown: float = 0.1,
    rates: Rates | None = None,
) -> Profiles:
    """What `autochunk` would do to a model, which may lie on fake tensors: nothing is computed.

    Arguments and errors as `autochunk`; `rates` of the device that is to run it, if not this one.
    """
    budget = checked_budget(max_memory, max_slowdown)
    register_containers()
    planned = find_plan(model, *bind(model, (), dict(kwargs)), budget, rates)
    return Profiles(planned.captured, planned.plan, planned.lowered)


def longest(fits: Callable[[int], bool], step: int, known: int = 0, within: float = 0.02) -> int:
    """The largest multiple of `step` that fits, to within a share of it; 0 if none does.

    What fits has to fit when it is shorter, too; `known`, a multiple of `step`, is known to fit.
    """
    low, high = known, max(step, 2 * known)
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(step, int(within * low)):
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
