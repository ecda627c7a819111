"""The packing check of decoders in transformers 5, in traces and in runs on fake tensors.

Without a padding mask, such a decoder checks whether `position_ids` are those of several packed
sequences. It skips the check for tensors without values, and then builds a causal mask of tokens x
tokens, which fused attention does not need for one sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

aten = torch.ops.aten
_RANGES = (aten.arange.default, aten.arange.start)
_KEEP_INCREMENTS = (aten.unsqueeze.default, aten.add.Tensor)
_CHECK = "find_packed_sequence_indices"  # None for one sequence


def packing_check_on_fakes() -> AbstractContextManager[Any]:
    """Inside, a run on fake tensors makes the check; `FakeRun` answers for their values."""
    utils = sys.modules.get("transformers.utils.import_utils")

    def check(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(utils, "is_fake_tensor", lambda _: False):
            return original(*args, **kwargs)

    return _replaced(check) if hasattr(utils, "is_fake_tensor") else nullcontext()


def skipped_packing_check() -> AbstractContextManager[Any]:
    """Inside a trace, positions that the model itself makes by `arange` are one sequence; other
    positions are checked as usual."""

    def check(original: Callable[..., Any], position_ids: torch.Tensor) -> Any:
        return None if _is_range(position_ids) else original(position_ids)

    return _replaced(check)


def _replaced(check: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Inside, check(original check, *its arguments) is called in its place, if there is one."""
    module = sys.modules.get("transformers.masking_utils")
    if (original := getattr(module, _CHECK, None)) is None:
        return nullcontext()
    return mock.patch.object(module, _CHECK, partial(check, original))


def _is_range(position_ids: torch.Tensor) -> bool:
    """Whether the traced graph computes the positions by `arange`, plus numbers at most."""
    mode = get_proxy_mode()
    slot: Any = mode and get_proxy_slot(position_ids, mode.tracer, None)
    node = slot.proxy.node if slot else None
    while isinstance(node, fx.Node) and node.target in _KEEP_INCREMENTS:
        if sum(isinstance(x, fx.Node) for x in node.args) != 1 or node.kwargs:
            return False
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target in _RANGES and not node.all_input_nodes
