"""Random numbers during a comparison: fixed for it, then recorded to find equal dropout masks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from wf_backends.comm import Communicator, fingerprint, gather_small
from wf_transformers.families.stacks import sampled_summary
from wf_transformers.rng import generators_of

RANDOM_FUNCTIONS = "rand rand_like randn randn_like normal exponential bernoulli".split()
"""Random functions of torch, in place or not; `uniform_` is treated separately."""
FIXED_VALUE = 0.75  # of all elements; for `uniform_` the fraction of the way between its limits
SAME_ROWS = 1e-3  # largest difference between summaries of the same rows


class FixedRandomness(TorchFunctionMode):
    """Inside, dropout drops nothing, and all other random numbers are the same constant."""

    saw_dropout = False
    """Whether dropout was called."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if _is_dropout(name) and args:
            self.saw_dropout = True
            return args[0]
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        result = func(*args, **kwargs)
        if name.rstrip("_") in RANDOM_FUNCTIONS:
            return result.fill_(FIXED_VALUE)
        if name == "uniform_":
            low, high = _uniform_limits(*args[1:], **kwargs)
            return result.fill_(low + FIXED_VALUE * (high - low))
        if name in ("randint", "randint_like"):
            low, high = _integer_limits(args, kwargs)
            return result.fill_(low + int(FIXED_VALUE * (high - low)))
        if name == "randperm":
            return result.sort().values
        if name == "multinomial":
            return args[0].argmax(-1, keepdim=True).expand_as(result).contiguous()
        return result


def _is_dropout(name: str) -> bool:
    return name.removesuffix("_").rstrip("123d").endswith("dropout")


def _uniform_limits(low: float = 0.0, high: float = 1.0, **kwargs: Any) -> tuple[float, float]:
    """The limits of `Tensor.uniform_`, whose keywords are `from` and `to`."""
    return kwargs.get("from", low), kwargs.get("to", high)


def _integer_limits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """The limits of `torch.randint`, of which the lower one may be left out."""
    given = (*args, kwargs.get("low"), kwargs.get("high"))
    limits = [x for x in given if isinstance(x, int)]
    return (limits[0], limits[1]) if len(limits) > 1 else (0, limits[0])


@contextmanager
def restored_draws() -> Iterator[None]:
    """Restore the random states of NumPy, from which SpecAugment of Whisper draws, and of Python
    afterwards."""
    state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(state)
        random.setstate(python_state)


class DropoutRecorder(TorchFunctionMode):
    """Records the random state and the input of every dropout inside.

    With the same state ranks drop the same elements, which is wrong for different tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[str] = []
        """For each dropout the name of the innermost module that it ran in."""
        self._calls: list[tuple[float, float]] = []
        """(random state, summary of the input) of each dropout."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not (_is_dropout(getattr(func, "__name__", "")) and args):
            return func(*args, **(kwargs or {}))
        device, summary = args[0].device, float(sampled_summary(args[0]))
        state = _state(device)
        result = func(*args, **(kwargs or {}))
        if _state(device) != state:  # unchanged if it drops nothing
            self._calls.append((state, summary))
        return result

    def record_module(self, module: str, _: object) -> None:
        """Note that the new dropouts ran in `module`, which has just returned."""
        self.modules += [module] * (len(self._calls) - len(self.modules))

    def first_equal_mask(self, comm: Communicator) -> str | None:
        """The first module in which ranks drop the same elements of different tokens, or None.

        All ranks of `comm` must call it.
        """
        count = int(gather_small(comm, torch.tensor(len(self._calls))).min())
        calls = torch.tensor(self._calls[:count], dtype=torch.float64).view(count, 2)
        states, summaries = gather_small(comm, calls).unbind(-1)  # (ranks, dropouts) each
        differ = (summaries[:, None] - summaries).abs() > SAME_ROWS  # (ranks, ranks, dropouts)
        wrong = ((states[:, None] == states) & differ).any(0).any(0).nonzero()
        return (self.modules + ["it"] * count)[int(wrong[0])] if len(wrong) else None


def _state(device: torch.device) -> float:
    """A fingerprint of the random state of a device."""
    return float(fingerprint(generators_of(device)[-1].get_state().numpy().tobytes()))
