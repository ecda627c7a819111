"""The masks of decoders since transformers 4.53, in traces and in runs on fake tensors.

Without a padding mask, such a decoder checks whether `position_ids` are those of several packed
sequences. It skips the check for tensors without values, and then builds a causal mask of tokens x
tokens, which fused attention does not need for one sequence. Until 4.57 masks are made inside
`torch.vmap`, whose operators a trace does not see.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

aten = torch.ops.aten
_RANGES = (aten.arange.default, aten.arange.start)
_KEEP_INCREMENTS = (aten.unsqueeze.default, aten.add.Tensor, aten.expand.default)
_CHECK = "find_packed_sequence_indices"  # None for one sequence
_VMAP = "_vmap_for_bhqkv"  # from a function of single indices one of (batch, heads, rows, keys)
_INDEXING = "TransformGetItemToIndex"  # how tensors are indexed inside vmap


def packing_check_on_fakes() -> AbstractContextManager[Any]:
    """Inside, a run on fake tensors makes the check; `FakeRun` answers for their values."""
    utils = sys.modules.get("transformers.utils.import_utils")

    def check(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(utils, "is_fake_tensor", lambda _: False):
            return original(*args, **kwargs)

    return _replaced(check) if hasattr(utils, "is_fake_tensor") else nullcontext()


@contextmanager
def traced_masks() -> Iterator[None]:
    """Inside a trace, positions that the model itself makes by `arange` are one sequence; other
    positions are checked as usual. Masks are made by broadcasting."""

    def check(original: Callable[..., Any], position_ids: Tensor) -> Any:
        return None if _is_range(position_ids) else original(position_ids)

    module = sys.modules.get("transformers.masking_utils")
    masks: Any = {_VMAP: _broadcast, _INDEXING: nullcontext}
    by_vmap = hasattr(module, _VMAP)
    with _replaced(check), mock.patch.multiple(module, **masks) if by_vmap else nullcontext():
        yield


def _broadcast(mask_function: Callable[..., Tensor], **_: Any) -> Callable[..., Tensor]:
    """A function that makes a mask (b, h, s, t) of the indices of samples (b,), heads (h,), rows
    (s,) and keys (t,), of one of single indices."""

    def mask(*indices: Tensor) -> Tensor:
        shape = [len(x) for x in indices]
        axes = [
            x.view([-1 if i == axis else 1 for i in range(4)]) for axis, x in enumerate(indices)
        ]
        return mask_function(*axes).expand(shape)

    return mask


def _replaced(check: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Inside, check(original check, *its arguments) is called in its place, if there is one."""
    module = sys.modules.get("transformers.masking_utils")
    if (original := getattr(module, _CHECK, None)) is None:
        return nullcontext()
    return mock.patch.object(module, _CHECK, partial(check, original))


def _is_range(position_ids: Tensor) -> bool:
    """Whether the traced graph computes the positions (b, s) by `arange`, plus numbers at most, and
    the same for every sample."""
    mode = get_proxy_mode()
    slot: Any = mode and get_proxy_slot(position_ids, mode.tracer, None)
    node = slot.proxy.node if slot else None
    while isinstance(node, fx.Node) and node.target in _KEEP_INCREMENTS:
        if sum(isinstance(x, fx.Node) for x in node.args) != 1 or node.kwargs:
            return False
        (source,) = node.all_input_nodes
        if source.meta["val"].shape[-1] != node.meta["val"].shape[-1]:
            return False
        node = source
    return isinstance(node, fx.Node) and node.target in _RANGES and not node.all_input_nodes
