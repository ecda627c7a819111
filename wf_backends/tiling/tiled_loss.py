"""Logits and cross entropy by parts of the tokens: never all logits at a time.

For causal language models of Hugging Face's form, whose forward calls its head, then
`self.loss_function(logits=..., labels=...)`. The loss is made inside the head's call, because FSDP2
and ZeRO 3 have the head's weight there only; what the model takes for logits is that loss, and
`loss_function` passes it on. With N tokens that have a label (or the caller's number of them):

    loss = sum over tiles t of sum(cross_entropy(head(x[t]), labels[t])) / N
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wf_backends._compile import eager
from wf_backends.parallel import IGNORE_INDEX
from wf_backends.tiling.handle import Handle
from wf_backends.tiling.tiled_call import Original, TiledCall

LOSS = "ForCausalLMLoss"
"""What transformers calls the loss that is understood here."""


def tile_loss(owner: nn.Module, head: nn.Module, tiles: int, handle: Handle) -> None:
    """Have the loss of `owner`, in training and called with labels, made of `tiles` parts.

    Its output then has no logits.

    Raises:
        NotImplementedError: for a model whose loss is another one.
    """
    name = loss_name(owner)
    if name != LOSS:
        raise NotImplementedError(
            f"the loss of {type(owner).__name__} is {name}, and not transformers' {LOSS}"
        )
    loss = _HeadLoss(owner, head, tiles)
    handle.set(head, "forward", loss)
    handle.set(owner, "loss_function", loss.given)
    before = owner.register_forward_pre_hook(loss.before, with_kwargs=True)
    after = owner.register_forward_hook(loss.after, always_call=True)
    handle.callback(before.remove)
    handle.callback(after.remove)


def loss_name(owner: nn.Module) -> str | None:
    """What the model's `loss_function` is called; None if it has none."""
    return getattr(getattr(owner, "loss_function", None), "__name__", None)


def torch_has_the_loss(head: nn.Module) -> bool:
    """Whether `linear_cross_entropy` gives the loss of this head's logits, and computes them once.

    In 16 bits its loss is rounded to them, and it pays no heed to autocast.
    """
    wide = type(head) is nn.Linear and head.weight.dtype in (torch.float32, torch.float64)
    return wide and hasattr(F, "linear_cross_entropy")


class _HeadLoss:
    """In the place of the head's `forward`: logits as ever, or the loss of the call's labels."""

    def __init__(self, owner: nn.Module, head: nn.Module, tiles: int) -> None:
        self.head: Any = head
        self.tiles = tiles
        self.loss_function: Any = owner.loss_function
        self.compute, self.by_torch = head.forward, torch_has_the_loss(head)
        self.names = list(inspect.signature(type(owner).forward).parameters)[1:]  # without self
        self.losses = TiledCall(_TokenLosses(head), 0, tiles)
        self.call: Mapping[str, Any] | None = None
        self.made: Tensor | None = None

    @eager
    def before(self, owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        self.call = given if owner.training and given.get("labels") is not None else None

    @eager
    def __call__(self, hidden: Tensor) -> Tensor:
        """(b, s, width) -> (b, s, vocabulary), or the loss."""
        if self.call is None:
            return self.compute(hidden)
        labels = _shifted(self.call)
        if labels.shape != hidden.shape[:-1]:
            raise ValueError(
                f"labels must be {tuple(hidden.shape[:-1])}, one for each row of the head, got "
                f"{tuple(labels.shape)}"
            )
        count = self.call.get("num_items_in_batch")
        count = (labels != _ignored(self.call)).sum() if count is None else count
        total = self._sum(hidden.flatten(0, -2), labels.flatten().to(hidden.device))
        self.made = loss = total / count
        return loss

    def _sum(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The cross entropies of (n, width) and (n,), summed."""
        assert self.call is not None
        index = _ignored(self.call)
        if self.by_torch and not torch.is_autocast_enabled(hidden.device.type):
            rows = -(-len(hidden) // self.tiles)
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None)
            words = {"linear_bias": self.head.bias, "ignore_index": index, "options": options}
            weight = self.head.weight
            return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", **words)
        return self.losses(hidden, labels, index).sum()

    def given(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In the place of the model's `loss_function`: what the head made."""
        if self.call is None:
            return self.loss_function(logits, *args, **kwargs)
        if not _is_the_same(logits, self.made):
            raise NotImplementedError(
                "this model changes its logits before the loss, which is not tiled: leave the "
                "head's tiles out"
            )
        return logits

    @eager
    def after(self, owner: nn.Module, args: Any, output: Any) -> Any:
        """The output without logits."""
        made, self.made, self.call = self.made, None, None
        if made is None or output is None:
            return None
        if isinstance(output, Mapping):
            return type(output)(**{k: v for k, v in output.items() if v is not made or k == "loss"})
        return (output[0], *(x for x in output[1:] if x is not made))


class _TokenLosses(nn.Module):
    """The cross entropy of each row, 0 where its label counts for nothing."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.logits = Original(head)

    def forward(self, hidden: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        logits = self.logits(hidden)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, labels, ignore_index=ignore_index, reduction="none")


def _is_the_same(x: Tensor, made: Tensor | None) -> bool:
    """Whether nobody computed with it in between; hooks of frameworks may detach it."""
    if made is None or x._version:
        return False
    return x.untyped_storage()._cdata == made.untyped_storage()._cdata


def _ignored(call: Mapping[str, Any]) -> int:
    """The label of tokens that count for nothing."""
    return call.get("ignore_index", IGNORE_INDEX)


def _shifted(call: Mapping[str, Any]) -> Tensor:
    """(b, s): the label that each row predicts."""
    given = call.get("shift_labels")
    return (
        given if given is not None else F.pad(call["labels"], (0, 1), value=_ignored(call))[..., 1:]
    )
