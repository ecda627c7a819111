"""A model that is called with whole batches and computes its part of them.

Forward hooks of torch: one cuts the batch before the model, one puts the group's loss into its
output; of a model that makes a loss of its own, one makes the logits whole for it. Without labels,
and in evaluation, the output has the logits of the whole batch on every rank; beside labels
`whole_logits=` says whether it has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wf_backends._compile import eager
from wf_backends.parallel import count_valid, token_loss
from wf_transformers.batch import forward_kwargs
from wf_transformers.calls import PARTIAL_STATES, by_name
from wf_transformers.documents import mask_words
from wf_transformers.draws import WholeNoise
from wf_transformers.families.experts import asks_router_loss, router_loss
from wf_transformers.families.media import media_of, media_words, shard_media
from wf_transformers.families.stacks import is_cut_inside, whole_rows
from wf_transformers.handle import Handle, recorded
from wf_transformers.models import Head, head_of, inner_models, outermost
from wf_transformers.whole_batches.arguments import (
    INSTEAD,
    argument_names,
    is_by_token,
    keep_padding_in_range,
    logits_of,
    own_words,
    refuse_arguments,
    refuse_overwriting,
    refuse_unknown_words,
    seqlen_of,
    unknown_labels,
    with_documents,
    with_slices,
)
from wf_transformers.whole_batches.call import Call
from wf_transformers.whole_batches.heads import HeadHooks, head_is_over_all_rows
from wf_transformers.whole_batches.own_loss import (
    FUSED,
    INPUTS,
    fused_fields,
    no_head,
    output_embeddings,
    own_loss,
)
from wf_transformers.whole_batches.sharded_logits import LocalLogits

WHOLE_LOGITS = "whole_logits"
LOG = logging.getLogger(__name__)


class WholeBatchHooks:
    """The hooks of one model, whose gradients are averaged over all ranks of the job.

    Args:
        handle: what attached the model; its `remove()` takes the hooks off, too.
        whole_logits: whether logits are those of the whole batch in training beside labels, too.
        head: what labels are. None: told by the model's class.
    """

    whole_without_labels = True
    """Whether logits are whole where no labels are passed, for a loss that the caller makes."""
    hides_local_logits = True
    """Whether logits of this rank's tokens are an error to use, unless the call asks for them."""
    compares_first = True
    """Whether the model is compared with itself alone on the first batch that it trains on."""

    def __init__(
        self,
        model: nn.Module,
        handle: Handle,
        whole_logits: bool = False,
        head: Head | None = None,
    ) -> None:
        if handle.sp.size > 1 and any(map(_is_ours, model._forward_pre_hooks.values())):
            raise ValueError(
                f"{type(model).__name__} takes whole batches already, and would cut them twice: "
                "call remove() of what connected it first"
            )
        self.model, self.handle, self._always_whole = model, handle, whole_logits
        self._media = next((one for one in outermost(model) if media_of(one)), None)
        self._head: Head = head or ("causal" if self._media else head_of(model))
        self._names = argument_names(model)
        self._call: Call | None = None
        self._head_called = self._told = False
        self._noise = WholeNoise()
        self._hooks: tuple[Any, ...] = ()
        handle.whole_batches = True
        with recorded(handle):
            if not is_cut_inside(model):  # which takes them as it is
                self._register(model)
            handle.share_operations(model)
        handle.undo.callback(self.remove)

    def _register(self, model: nn.Module) -> None:
        if head_is_over_all_rows(model):
            heads = [HeadHooks(one, self.handle) for one in outermost(model)]
            self._hooks = tuple(hook for head in heads for hook in head.hooks)
            return
        self._hooks = (
            model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._after),
            model.register_forward_hook(self._leave, always_call=True),
            *(head.register_forward_hook(self._at_head) for head in output_embeddings(model)),
            *(m.register_forward_pre_hook(self._inside, prepend=True) for m in inner_models(model)),
        )

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.handle.sp.size

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    @eager
    def _before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        given = own_words(by_name(self._names, args, kwargs))
        if self.compares_first and model.training and torch.is_grad_enabled():
            self.handle.compare_first(given)
        given = with_slices(given, self._head)
        refuse_arguments(given)
        labelled, fused = given.get("labels") is not None, bool(given.get(FUSED))
        if labelled and self._head == "other":
            raise NotImplementedError(unknown_labels(model))
        whole, hidden = self._logits(given.pop(WHOLE_LOGITS, None), model.training, labelled)
        leaves_loss = labelled and not fused and self._leaves_loss(model, given)
        seqlen = seqlen_of(given)
        batch = self._batch(given, seqlen)
        if any(asks_router_loss(one, given) for one in outermost(model)):
            batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        if leaves_loss:
            self._tell_padding(batch)
            given["labels"] = self.handle.without_padded_labels(batch)["labels"]
            batch = {key: value for key, value in batch.items() if key in INPUTS}
        given = {k: v for k, v in given.items() if k not in batch}
        local = self._cut(batch)
        keep_padding_in_range(model, local, seqlen)
        num_items = None if leaves_loss or self._media else given.pop("num_items_in_batch", None)
        self._call = Call(seqlen, local, num_items, whole, hidden, fused, leaves_loss)
        self.handle.attention.logits_are_whole, self._head_called = leaves_loss, False
        self._noise.enter(model, seqlen_of(local), seqlen)
        return (), self._words(model, given, local)

    def _logits(self, asked: bool | None, trains: bool, labelled: bool) -> tuple[bool, bool]:
        """Whether the output has those of the whole batch, and whether it has none at all."""
        wanted = self._always_whole or not trains if asked is None else asked
        whole = wanted or (self.whole_without_labels and not labelled)
        return whole, self.hides_local_logits and asked is None and not whole

    def _tell_padding(self, batch: dict[str, Any]) -> None:
        """Warn once where a loss of the model's own gets logits of padding."""
        mask = batch.get("attention_mask")
        if not self._told and isinstance(mask, Tensor) and not bool(mask.all()):
            self._told = True
            LOG.warning(
                "this model makes a loss of its own, and logits at padding are not those of one "
                "device: leave them out of it, as cross entropy does by labels of -100"
            )

    def _leaves_loss(self, model: nn.Module, given: dict[str, Any]) -> bool:
        """Whether the model is to make the loss of this call."""
        found = own_loss(model, given)
        if found and self.handle.averages_tokens and given.get("num_items_in_batch") is None:
            raise NotImplementedError(
                f'{found}, and "loss_average": "token" knows plain cross entropy only: take '
                '"sequence"'
            )
        return found is not None

    @eager
    def _leave(self, *_: Any) -> None:
        """After a call, also one that failed."""
        self._call = None
        self._noise.leave()

    def _inside(self, inner: nn.Module, _: Any) -> None:
        """Refuse a call of a model inside that goes round the hooks: nothing would be cut."""
        if self._call is None:
            raise NotImplementedError(
                f"{type(inner).__name__} was called, and not the model around it that takes whole "
                f"batches: every rank would take its rows for a part of the sequence; {INSTEAD}"
            )

    @eager
    def _at_head(self, _: nn.Module, __: Any, logits: Tensor) -> Tensor | None:
        """The rows of all ranks, where the model makes a loss of its own from them."""
        call = self._call
        if call is None or not call.own_loss:
            return None
        rows = seqlen_of(call.local)
        if logits.dim() < 3 or logits.shape[1] != rows:
            raise NotImplementedError(
                f"the output embeddings gave {tuple(logits.shape)}, not a row for each of the "
                f"{rows} tokens of this rank, beside a loss of the model's own; {INSTEAD}"
            )
        self._head_called = True
        return self._whole(logits, call).contiguous()  # as losses with `view` need it

    def _batch(self, given: dict[str, Any], seqlen: int) -> dict[str, Any]:
        """Those arguments of a call that are cut."""
        media = [] if self._media is None else media_words(self._media)
        found = {k: v for k, v in given.items() if k in media or is_by_token(k, v, seqlen)}
        return found if media else with_documents(found)

    def _cut(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of them."""
        if self._media is None:
            return self.handle.shard_batch(batch, labels_are_shifted=self._head == "masked")
        return shard_media(self._media, self.handle.sp, batch)

    def _words(
        self, model: nn.Module, given: dict[str, Any], local: dict[str, Any]
    ) -> dict[str, Any]:
        """What the model is called with: this rank's part, and what was given beside it."""
        ours = forward_kwargs(model, local)
        refuse_overwriting(given, ours)
        words = given | ours
        words |= {"shift_labels": local.get("labels")} if given.get(FUSED) else {}
        refuse_unknown_words(model, self._names, words)
        return words

    @eager
    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call, self._call = self._call, None
        assert call is not None, "the hook before the model did not run"
        self.handle.attention.logits_are_whole = False
        if call.own_loss:
            return self._own_output(model, output)
        if call.fused:
            whole = partial(self._whole, call=call)
            return type(output)(**fused_fields(output, call.num_items, whole))
        logits = logits_of(model, output, seqlen_of(call.local))
        fields = dict(output)
        if call.local.get("labels") is not None:
            fields["loss"] = self._loss(model, logits, call, router_loss(model, output))
        if "router_logits" in fields:
            fields["router_logits"] = None  # of this rank's tokens
        if call.whole:
            fields["logits"] = self._whole(logits, call)
        elif call.hidden:
            fields["logits"] = LocalLogits()
        return type(output)(**fields)

    def _own_output(self, model: nn.Module, output: Any) -> Any:
        """What a model that makes its own loss returned."""
        if not self._head_called:
            raise NotImplementedError(no_head(model))
        if isinstance(output, Mapping) and output.get("hidden_states") is not None:
            raise NotImplementedError(PARTIAL_STATES)
        return output

    def _whole(self, x: Tensor, call: Call) -> Tensor:
        """(b, S, ...): rows of all ranks."""
        return whole_rows(self.handle.sp, x, call.seqlen, **mask_words(call.local))

    def _loss(
        self, model: nn.Module, logits: Tensor, call: Call, more: Tensor | float = 0.0
    ) -> Tensor:
        """The loss of the batch, the same on every rank of the group, and `more`, which is so.

        Its gradient is that of this rank's share x size: the mean over the world makes the gradient
        of the loss of it.
        """
        size, share = self.handle.sp.size, self._share(model, logits, call) + more
        return self.handle.sp.sum_over_ranks(share) / size + (share - share.detach())

    def _share(self, model: nn.Module, logits: Tensor, call: Call) -> Tensor:
        """This rank's share of the loss x size, float32 or wider.

        The Trainer of transformers 5 counts valid labels in evaluation too, and scales by the
        number of ranks itself.
        """
        sp, labels = self.handle.sp, call.local["labels"]
        if call.num_items is not None:
            return token_loss(logits, labels, call.num_items) * sp.size
        if model.training and self.handle.averages_tokens:
            return self.handle.loss(logits, labels)
        num_valid = sp.sum_over_ranks(count_valid(labels))
        share = token_loss(logits, labels, num_valid) * sp.size
        return torch.where(num_valid > 0, share, torch.nan)  # as the mean over nothing


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), WholeBatchHooks)
