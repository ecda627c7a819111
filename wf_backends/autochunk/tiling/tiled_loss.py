"""Logits and cross entropy by tiles of tokens: all logits never exist at one time.

For causal language models of Hugging Face, whose forward calls its head and then
`self.loss_function(logits=..., labels=...)`. The losses are computed inside the head's call,
because FSDP2 and ZeRO 3 gather the head's weight only there. The head returns their sum in the
place of the logits, and the replaced `loss_function` divides it. With N tokens that have a label
(or the number of them that `loss_function` is given):

    loss = sum over tiles t of sum(cross_entropy(head(x[t]), labels[t])) / N

    b  batch    s  tokens    n = b s    h  hidden size    v  vocabulary
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wf_backends._compile import eager
from wf_backends.autochunk.tiling.handle import Handle
from wf_backends.autochunk.tiling.original import Original
from wf_backends.autochunk.tiling.tiled_call import TiledCall
from wf_backends.parallel import IGNORE_INDEX

CAUSAL_LM_LOSS = "ForCausalLMLoss"
"""The name in transformers of the only loss that can be tiled."""
_LOSS_ARGUMENTS = ("labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels")
"""Of this function, after the logits."""
WIDE = (torch.float32, torch.float64)


def tile_loss(owner: nn.Module, head: nn.Module, tiles: int, handle: Handle) -> None:
    """Have `owner` compute its loss in tiles, in training mode and if it is called with labels.

    Its output then has no logits.
    """
    name = loss_name(owner)
    if name != CAUSAL_LM_LOSS:
        raise NotImplementedError(
            f"the loss of {type(owner).__name__} is {name}, and not transformers' {CAUSAL_LM_LOSS}"
        )
    loss = HeadLoss(owner, head, tiles)
    handle.set(head, "forward", loss)
    handle.set(owner, "loss_function", loss.loss_of_logits)
    handle.callback(owner.register_forward_pre_hook(loss.pre_forward, with_kwargs=True).remove)
    handle.callback(owner.register_forward_hook(loss.after_forward, always_call=True).remove)


def loss_name(owner: nn.Module) -> str | None:
    """The name of the model's `loss_function`; None if it has none."""
    return getattr(getattr(owner, "loss_function", None), "__name__", None)


def torch_has_the_loss(head: nn.Module) -> bool:
    """Whether torch's `linear_cross_entropy` can compute this head's loss.

    It computes logits only once. In 16 bits it would round the loss, and it ignores autocast.
    """
    is_wide_linear = type(head) is nn.Linear and head.weight.dtype in WIDE
    return is_wide_linear and hasattr(F, "linear_cross_entropy")


class HeadLoss:
    """Replaces the head's `forward`: returns logits, or a sum of losses if the model got labels.

    `call` are the arguments of the model's current forward by name, None if it has no tiled loss;
    `sum` is what the head returned in it.
    """

    def __init__(self, owner: nn.Module, head: nn.Module, tiles: int) -> None:
        self.head: Any = head
        self.tiles = tiles
        self.loss_function: Any = owner.loss_function
        self.original_forward, self.by_torch = head.forward, torch_has_the_loss(head)
        self.argument_names = list(inspect.signature(type(owner).forward).parameters)[1:]  # no self
        self.token_losses = TiledCall(_TokenLosses(head), 0, tiles)
        self.call: Mapping[str, Any] | None = None
        self.sum: Tensor | None = None

    @eager
    def pre_forward(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = dict(zip(self.argument_names, args, strict=False)) | kwargs
        self.call = call if owner.training and call.get("labels") is not None else None

    @eager
    def __call__(self, hidden: Tensor) -> Tensor:
        """(b, s, h) -> logits (b, s, v), or the sum of the losses ()."""
        if self.call is None:
            return self.original_forward(hidden)
        labels = _shifted_labels(self.call)
        if labels.shape != hidden.shape[:-1]:
            raise ValueError(
                f"labels must be {tuple(hidden.shape[:-1])}, one for each row of the head, got "
                f"{tuple(labels.shape)}"
            )
        labels = labels.to(hidden.device)
        # A copy, since torch writes to its own: a version above 0 tells that the model has written.
        self.sum = self._sum(hidden.flatten(0, -2), labels.flatten()).clone()
        return self.sum

    def _sum(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The sum of the cross entropies of hidden (n, h) and labels (n,)."""
        assert self.call is not None
        index, device = _ignore_index(self.call), hidden.device.type
        by_torch = self.by_torch and self.head.weight.dtype in WIDE  # engines cast tiled models
        if by_torch and not torch.is_autocast_enabled(device):
            rows = -(-len(hidden) // self.tiles)
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None)
            kwargs = {"linear_bias": self.head.bias, "ignore_index": index, "options": options}
            weight = self.head.weight
            return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", **kwargs)
        return self.token_losses(hidden, labels, index).sum()

    def loss_of_logits(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Replaces the model's `loss_function`: what it gets as logits is the sum of the head."""
        if self.call is None:
            return self.loss_function(logits, *args, **kwargs)
        if not _is_unchanged(logits, self.sum):
            raise NotImplementedError(
                "this model changes its logits before the loss, which is not tiled: leave the "
                "head's tiles out"
            )
        given = dict(zip(_LOSS_ARGUMENTS, args, strict=False)) | kwargs
        for name in ("labels", "ignore_index", "shift_labels"):
            default = IGNORE_INDEX if name == "ignore_index" else None
            if not _is_same(given.get(name, default), self.call.get(name, default)):
                raise NotImplementedError(
                    f"this model computes its loss with other {name} than it is given, which is not"
                    " tiled: leave the head's tiles out"
                )
        num_items = given.get("num_items_in_batch")
        if num_items is not None:
            return logits / num_items
        # Without any label NaN with gradients of 0, as torch's cross entropy.
        labels = _shifted_labels(self.call).to(logits.device)
        count = (labels != _ignore_index(self.call)).sum()
        return torch.where(count > 0, logits / count.clamp(min=1), torch.nan)

    @eager
    def after_forward(self, owner: nn.Module, args: Any, output: Any) -> Any:
        """The model's output without logits; None leaves it as it is."""
        total = self.sum
        self.sum = self.call = None
        if total is None or output is None:
            return None
        if isinstance(output, Mapping):
            return type(output)(**{key: x for key, x in output.items() if x is not total})
        return tuple(x for x in output if x is not total)


class _TokenLosses(nn.Module):
    """The cross entropy of each row, 0 where its label is `ignore_index`."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = Original(head)

    def forward(self, hidden: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        """(n, h), (n,) -> (n,), in float32 or wider."""
        logits = self.head(hidden)
        upcast = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(upcast, labels, ignore_index=ignore_index, reduction="none")


def _is_unchanged(x: Tensor, total: Tensor | None) -> bool:
    """Whether x still is the head's sum; hooks of frameworks may have detached it."""
    if total is None or not (x.is_inference() or x._version == 0):
        return False
    return x.untyped_storage()._cdata == total.untyped_storage()._cdata


def _is_same(x: Any, y: Any) -> bool:
    """Whether x is the tensor y or a view of it, or a number equal to y; a tensor on another
    device may be its copy."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        same_memory = x.untyped_storage()._cdata == y.untyped_storage()._cdata
        return same_memory or x.device != y.device
    return x is y or (not isinstance(x, Tensor) and not isinstance(y, Tensor) and x == y)


def _ignore_index(call: Mapping[str, Any]) -> int:
    """The label of tokens that do not count in the loss."""
    return call.get("ignore_index", IGNORE_INDEX)


def _shifted_labels(call: Mapping[str, Any]) -> Tensor:
    """(b, s): the label that each row predicts."""
    shift_labels = call.get("shift_labels")
    if shift_labels is not None:
        return shift_labels
    return F.pad(call["labels"], (0, 1), value=_ignore_index(call))[..., 1:]
