"""What the forward of a model may be called with."""

from __future__ import annotations

import inspect

from torch import nn


def parameter_names(model: nn.Module) -> list[str]:
    """Of the model's forward, in order."""
    return list(inspect.signature(model.forward).parameters)


def takes_any_keyword(model: nn.Module) -> bool:
    """Whether the model's forward has **kwargs."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
