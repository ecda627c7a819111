"""Whether a decoder of transformers 5 may ask that its positions are those of one sequence.

It asks in every real run where no padding mask is given. Of tensors without values it does not, and
builds a causal mask of tokens x tokens, which fused attention has no need of otherwise. A padding
mask is not concerned: it is one that depends on values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

aten = torch.ops.aten
_RANGES = (aten.arange.default, aten.arange.start)
_KEEP_STEPS = (aten.unsqueeze.default, aten.add.Tensor)
_FIND = "find_packed_sequence_indices"


def packing_is_asked() -> AbstractContextManager[Any]:
    """In a run on fake tensors: it is asked, and whoever answers for values answers."""
    asked, find = sys.modules.get("transformers.utils.import_utils"), _find()

    def packed(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(asked, "is_fake_tensor", lambda _: False):
            return find(*args, **kwargs)

    return _answered_by(packed) if find and hasattr(asked, "is_fake_tensor") else nullcontext()


def ranges_are_not_packed() -> AbstractContextManager[Any]:
    """In a trace: positions that the model counts itself are one sequence; of others nothing is
    known."""
    find = _find()

    def packed(position_ids: torch.Tensor) -> Any:
        return None if _is_counted(position_ids) else find(position_ids)

    return _answered_by(packed) if find else nullcontext()


def _answered_by(packed: Callable[..., Any]) -> AbstractContextManager[Any]:
    return mock.patch.object(sys.modules["transformers.masking_utils"], _FIND, packed)


def _find() -> Any:
    return getattr(sys.modules.get("transformers.masking_utils"), _FIND, None)


def _is_counted(position_ids: torch.Tensor) -> bool:
    """Whether the graph that is traced makes them by `arange`, and adds at most a number."""
    mode = get_proxy_mode()
    slot: Any = mode and get_proxy_slot(position_ids, mode.tracer, None)
    node = slot.proxy.node if slot else None
    while isinstance(node, fx.Node) and node.target in _KEEP_STEPS:
        if sum(isinstance(x, fx.Node) for x in node.args) != 1 or node.kwargs:
            return False
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target in _RANGES and not node.all_input_nodes
