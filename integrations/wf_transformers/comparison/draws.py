"""What a model draws while it is compared: nothing. Then once more, whether ranks drop alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from wf_backends.comm import Communicator, fingerprint, gather_small

DRAWS = ("rand", "rand_like", "randn", "randn_like", "normal", "exponential", "bernoulli")
"""Functions of torch that draw, in place or not. `uniform_` does so between two limits."""
DRAWN = 0.75  # what all elements become, or how far between the limits
SAME_ROWS = 1e-3  # the most that summaries of the same rows differ by
EPSILON = 1e-30


class FixedDraws(TorchFunctionMode):
    """Inside, dropout drops nothing, and what else is drawn is the same number everywhere.

    Attributes:
        asked: whether dropout was called.
    """

    asked = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if _is_dropout(name) and args:
            self.asked = True
            return args[0]
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        found = func(*args, **kwargs)
        if name.rstrip("_") in DRAWS:
            return found.fill_(DRAWN)
        if name == "uniform_":
            low, high = _limits(*args[1:], **kwargs)
            return found.fill_(low + DRAWN * (high - low))
        return found


def _is_dropout(name: str) -> bool:
    return name.removesuffix("_").rstrip("123d").endswith("dropout")


def _limits(low: float = 0.0, high: float = 1.0, **_: Any) -> tuple[float, float]:
    """Of `Tensor.uniform_`, whose keywords are `from` and `to`."""
    return _.get("from", low), _.get("to", high)


class SeenDropouts(TorchFunctionMode):
    """Notes at every dropout inside where the generator stands and what is given to it.

    From one state ranks drop the same places: of the same rows, as they should where all ranks have
    these, or of different tokens.

    Attributes:
        places: by dropout the innermost module that it ran in; see `returned`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self._notes: list[tuple[float, float]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not (_is_dropout(getattr(func, "__name__", "")) and args):
            return func(*args, **(kwargs or {}))
        device, given = args[0].device, _summary(args[0])
        before = _state(device)
        found = func(*args, **(kwargs or {}))
        if _state(device) != before:  # else it drops nothing
            self._notes.append((before, given))
        return found

    def returned(self, module: str, _: object) -> None:
        """A module returned: the dropouts that are new ran in it."""
        self.places += [module] * (len(self._notes) - len(self.places))

    def alike(self, comm: Communicator) -> str | None:
        """Where ranks drop the same places of different tokens, the first of all; None if nowhere.

        All ranks of `comm` call it.
        """
        count = int(gather_small(comm, torch.tensor(len(self._notes))).min())
        notes = torch.tensor(self._notes[:count], dtype=torch.float64).view(count, 2)
        states, given = gather_small(comm, notes).unbind(-1)  # (ranks, dropouts)
        other = (given[:, None] - given).abs() > SAME_ROWS  # (ranks, ranks, dropouts)
        found = ((states[:, None] == states) & other).any(0).any(0).nonzero()
        return (self.places + ["it"] * count)[int(found[0])] if len(found) else None


def _state(device: torch.device) -> float:
    """A number that two generators of a kind of device have in common if they draw the same."""
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    return float(fingerprint(module.get_rng_state().numpy().tobytes()))


def _summary(x: Tensor) -> float:
    """Equal tensors have it in common but for rounding; of others it is about normal."""
    flat = x.detach().double().flatten()
    wave = torch.arange(len(flat), device=x.device).double().cos()
    return float(flat @ wave / flat.norm().clamp(min=EPSILON))
