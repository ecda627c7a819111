"""Forward hooks for a model that is called with whole batches and computes this rank's part.

A hook before the model cuts the batch. A hook after it puts the loss of all ranks into the output.
If the model computes its own loss, a hook on the output embeddings gathers the logits for it.
Without labels, and in evaluation, the output has the logits of the whole batch on every rank; in
training with labels only if `whole_logits=True`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wf_backends._compile import eager
from wf_backends.parallel import count_valid, mask_arguments, token_loss
from wf_transformers.batch import forward_kwargs
from wf_transformers.calls import PARTIAL_STATES, Kwargs, by_name
from wf_transformers.families.experts import router_loss, wants_router_loss
from wf_transformers.families.media import shard_media
from wf_transformers.families.media_table import media_arguments, media_of
from wf_transformers.families.stacks import is_cut_inside, whole_rows
from wf_transformers.handle import Handle, recorded_changes
from wf_transformers.models import Head, head_of, inner_models, outermost
from wf_transformers.rng import scale_noise
from wf_transformers.whole_batches.arguments import (
    CUSTOM_LOOP,
    UNKNOWN_LABELS,
    BatchCall,
    LossKind,
    WhichLogits,
    argument_names,
    has_row_per_token,
    logits_of,
    mask_of_ones,
    refuse_arguments,
    refuse_lost_arguments,
    refuse_other_rows,
    refuse_overwriting,
    seqlen_of,
    with_cu_seqlens,
    with_documents,
    with_slices,
)
from wf_transformers.whole_batches.custom_loss import (
    FUSED_HEAD,
    INPUTS,
    NO_HEAD,
    NUM_ITEMS,
    SKIP_LOGITS,
    custom_loss_reason,
    divides_by_items,
    fused_head_fields,
    fuses_loss,
    labels_for,
    output_embeddings,
    refuse_uncounted,
    warned_about_padding,
)
from wf_transformers.whole_batches.heads import HeadHooks, head_is_over_all_rows
from wf_transformers.whole_batches.sharded_logits import ShardedLogits, Unusable

WHOLE_LOGITS = "whole_logits"
TAKES_WHOLE = "wallfacer_takes_whole_batches"  # attribute of the model: the handle


class WholeBatchHooks:
    """The hooks of one model, whose gradients are averaged over all ranks of the job.

    Args:
        handle: of the attached model; its `remove()` removes the hooks too.
        whole_logits: whether the output has the logits of the whole batch in training with labels.
        head: what labels mean. None: it follows from the model's class.
    """

    whole_without_labels = True
    """Whether calls without labels return logits of the whole batch, for a loss of the caller."""
    hides_local_logits = True
    """Whether using logits of this rank's tokens is an error, unless the call asks for them."""

    def __init__(
        self, model: nn.Module, handle: Handle, whole_logits: bool = False, head: Head | None = None
    ) -> None:
        if handle.sp.size > 1 and TAKES_WHOLE in vars(model):
            raise ValueError(
                f"{type(model).__name__} takes whole batches already, and would cut them twice: "
                "call remove() of what connected it first"
            )
        self.model, self.handle, self.always_whole = model, handle, whole_logits
        self._media = next((inner for inner in outermost(model) if media_of(inner)), None)
        self._head: Head = head or ("causal" if self._media else head_of(model))
        self._names = argument_names(model)
        self._divides_by_items = all(map(divides_by_items, outermost(model)))
        self._call: BatchCall | None = None
        self._warned = False  # of logits at padding
        self._noise = ExitStack()
        handle.whole_batches = True
        with recorded_changes(handle):
            handle.set(model, TAKES_WHOLE, handle)
            if not is_cut_inside(model):  # such a model takes whole batches without hooks
                self._register(model)

    def _register(self, model: nn.Module) -> None:
        if head_is_over_all_rows(model):
            for inner in outermost(model):
                HeadHooks(inner, self.handle)
            return
        self.handle.before(model, self._before, first=True)
        self.handle.after(model, self._after)
        self.handle.after(model, self._leave, always=True)
        for embeddings in output_embeddings(model):
            self.handle.after(embeddings, self._gather_logits)
        for inner in inner_models(model):
            self.handle.before(inner, self._refuse_inner_call, first=True)

    @eager
    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        arguments = with_cu_seqlens(by_name(self._names, args, kwargs))
        if model.training and torch.is_grad_enabled():
            self.handle.compare_first(arguments)
        arguments = with_slices(model, arguments, self._head)
        refuse_arguments(arguments)
        logits, loss = self._wanted(model, arguments)
        seqlen = seqlen_of(arguments)
        batch = self._cut_arguments(arguments, seqlen)
        if any(wants_router_loss(inner, arguments) for inner in outermost(model)):
            batch.setdefault("attention_mask", mask_of_ones(batch))
        if loss == "custom":
            self._warned = self._warned or warned_about_padding(batch)
            arguments = self.handle.without_padded_labels(arguments)
            batch = {key: value for key, value in batch.items() if key in INPUTS}
        others = {k: v for k, v in arguments.items() if k not in batch}
        num_items = None if loss == "custom" else others.pop(NUM_ITEMS, None)
        num_items = num_items if loss == "fused_head" or self._divides_by_items else None
        call = self._call = BatchCall(seqlen, self._shard(batch), num_items, logits, loss)
        self.handle.attention.logits_are_whole = loss == "custom"
        scale_noise(self._noise, model, seqlen_of(call.local), seqlen)
        return (), self._model_kwargs(model, others, call)

    def _wanted(self, model: nn.Module, arguments: Kwargs) -> tuple[WhichLogits, LossKind]:
        """What a call wants; the arguments that say so are taken out."""
        labelled = arguments.get("labels") is not None
        if labelled and self._head == "other":
            raise NotImplementedError(UNKNOWN_LABELS.format(type(model).__name__))
        skips = bool(arguments.pop(SKIP_LOGITS, False))
        asked = arguments.pop(WHOLE_LOGITS, False if skips else None)
        logits = self._which_logits(asked, model.training, labelled)
        return logits, self._loss_kind(model, arguments, skips or logits == "hidden")

    def _which_logits(self, asked: Any, trains: bool, labelled: bool) -> WhichLogits:
        """`asked` is the `whole_logits` of the call: a bool, None, or "hidden"."""
        whole = self.always_whole or not trains if asked is None else asked is True
        if whole or (self.whole_without_labels and not labelled):
            return "whole"
        return "hidden" if self.hides_local_logits and asked is not False else "local"

    def _loss_kind(self, model: nn.Module, arguments: Kwargs, needs_no_logits: bool) -> LossKind:
        """`needs_no_logits` says whether nobody uses logits of this rank's tokens."""
        if arguments.get(FUSED_HEAD):
            if model.training and self.handle.averages_tokens:
                refuse_uncounted(f"the call has {FUSED_HEAD}=True", arguments)
            return "fused_head"
        if arguments.get("labels") is None:
            return "plain"
        if self._has_custom_loss(model, arguments):
            return "custom"
        may_fuse = needs_no_logits and self.hides_local_logits and not self.handle.averages_tokens
        return "fused_loss" if may_fuse and fuses_loss(model, arguments) else "plain"

    def _has_custom_loss(self, model: nn.Module, arguments: Kwargs) -> bool:
        """Whether the model must compute the loss of this call itself."""
        reason = custom_loss_reason(model, arguments)
        if reason and self.handle.averages_tokens:
            refuse_uncounted(reason, arguments)
        return reason is not None

    @eager
    def _leave(self, *_: Any) -> None:
        """After every call, even if it raised."""
        self._call, self.handle.attention.logits_are_whole = None, False
        self._noise.close()

    def _refuse_inner_call(self, inner: nn.Module, *_: Any) -> None:
        """Refuse a direct call of an inner model, whose tokens are not cut."""
        if self._call is None:
            raise NotImplementedError(
                f"{type(inner).__name__} was called, and not the model around it that takes whole "
                f"batches: every rank would take its rows for a part of the sequence; {CUSTOM_LOOP}"
            )

    @eager
    def _gather_logits(self, _: nn.Module, __: Any, logits: Tensor) -> Tensor | None:
        """After the output embeddings: gather the logits of all ranks for a custom loss."""
        call = self._call
        if call is None or call.loss != "custom":
            return None
        refuse_other_rows("the output embeddings gave", logits, seqlen_of(call.local))
        call.head_was_called = True
        return self._whole(logits, call).contiguous()  # for losses that call `view`

    def _cut_arguments(self, arguments: Kwargs, seqlen: int) -> Kwargs:
        """The arguments of a call that must be cut."""
        media = [] if self._media is None else media_arguments(self._media)
        keys = [k for k, x in arguments.items() if k in media or has_row_per_token(k, x, seqlen)]
        batch = {key: arguments[key] for key in keys}
        return batch if media else with_documents(batch)

    def _shard(self, batch: Kwargs) -> Kwargs:
        """This rank's part of the arguments that must be cut."""
        if self._media is None:
            return self.handle.shard_batch(batch, labels_are_shifted=self._head == "masked")
        return shard_media(self._media, self.handle.sp, batch)

    def _model_kwargs(self, model: nn.Module, arguments: Kwargs, call: BatchCall) -> Kwargs:
        """The arguments for the model, from those that were not cut and this rank's part."""
        ours = forward_kwargs(model, call.local)
        refuse_overwriting(arguments, ours)
        kwargs = arguments | ours | labels_for(call.loss, call.local.get("labels"))
        refuse_lost_arguments(model, self._names, kwargs)
        return kwargs

    @eager
    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call = self._call
        assert call is not None, "the hook before the model did not run"
        if call.loss == "custom":
            if not call.head_was_called:
                raise NotImplementedError(NO_HEAD.format(type(model).__name__))
            if isinstance(output, Mapping) and output.get("hidden_states") is not None:
                raise NotImplementedError(PARTIAL_STATES)
            return output
        if call.loss == "fused_head":
            gather, aux_loss = partial(self._whole, call=call), router_loss(model, output)
            return type(output)(**fused_head_fields(output, call.num_items, gather, aux_loss))
        fused = call.loss == "fused_loss"
        logits: Any = Unusable() if fused else logits_of(model, output, seqlen_of(call.local))
        # router logits are of this rank's tokens
        fields = dict(output) | dict.fromkeys({"router_logits"} & output.keys())
        if call.local.get("labels") is not None:
            fields["loss"] = self._loss(model, output, logits, call)
        if call.logits == "whole":
            fields["logits"] = self._whole(logits, call)
        elif call.logits == "hidden":
            fields["logits"] = logits if fused else self._sharded(logits, call)
        return type(output)(**fields)

    def _whole(self, x: Tensor, call: BatchCall) -> Tensor:
        """(b, s, ...) -> (b, S, ...): the rows of all ranks."""
        return whole_rows(self.handle.sp, x, call.seqlen, **mask_arguments(call.local))

    def _sharded(self, logits: Tensor, call: BatchCall) -> ShardedLogits:
        """Logits of this rank's tokens as those of all S tokens, or of those that are wanted."""
        gather, cut = partial(self._whole, call=call), partial(self._local_rows, call=call)
        tokens, starts = range(call.seqlen)[-call.num_kept :], call.starts
        if starts is None:
            starts = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        return ShardedLogits(logits, tokens, call.seqlen, starts, gather, cut)

    def _local_rows(self, x: Tensor, call: BatchCall) -> Tensor:
        """(b, S) -> (b, s): this rank's rows."""
        sp, borders = self.handle.sp, call.local.get("cu_seqlens")
        padding = sp.size * seqlen_of(call.local) - call.seqlen
        return sp.shard(nn.functional.pad(x, (0, padding)), 1, borders)

    def _loss(self, model: nn.Module, output: Any, logits: Any, call: BatchCall) -> Tensor:
        """The loss of the batch, with that of routers, the same on every rank of the group.

        Its gradient is that of this rank's share times the number of ranks, so that gradients
        averaged over all ranks are those of the loss.
        """
        size = self.handle.sp.size
        share = self._share(model, output, logits, call) + router_loss(model, output)
        return self.handle.sp.sum_over_ranks(share) / size + (share - share.detach())

    def _share(self, model: nn.Module, output: Any, logits: Any, call: BatchCall) -> Tensor:
        """This rank's share of the loss, times the number of ranks; float32 or wider.

        `call.num_items` may be set in evaluation too: the Trainer of transformers 5 counts valid
        labels there, and scales by the number of ranks itself.
        """
        sp, labels, num_items = self.handle.sp, call.local["labels"], call.num_items
        if num_items is None and model.training and self.handle.averages_tokens:
            return self.handle.loss(logits, labels)
        if num_items is None:
            num_items = sp.sum_over_ranks(count_valid(labels))
        if call.loss == "fused_loss":
            share = output["loss"] / num_items
        else:
            share = self._token_loss(model, logits, labels, num_items)
        has_labels = torch.as_tensor(num_items, device=share.device) > 0
        return torch.where(has_labels, share * sp.size, torch.nan)  # as the mean over nothing

    def _token_loss(
        self, model: nn.Module, logits: Tensor, labels: Tensor, num_items: Tensor | int
    ) -> Tensor:
        """The sum of the losses of this rank's tokens / num_items."""
        return token_loss(logits, labels, num_items)
