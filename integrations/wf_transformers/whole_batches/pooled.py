"""Models that score a sequence by its last token (`...ForSequenceClassification`, reward models).

The model around takes whole batches: its base model is cut, and the rows that its head `score`
gives, a number a label each, are brought together. So it picks the last token, and makes
a loss, as on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from wf_backends._compile import eager
from wf_transformers.batch import forward_kwargs
from wf_transformers.calls import PARTIAL_STATES, parameter_names
from wf_transformers.families.stacks import scale_gradient
from wf_transformers.handle import Handle, recorded
from wf_transformers.models import names_of, own_class
from wf_transformers.whole_batches.arguments import (
    is_by_token,
    keep_padding_in_range,
    refuse_arguments,
    refuse_overwriting,
    seqlen_of,
)
from wf_transformers.whole_batches.hooks import share_operations

CLASSIFIERS = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"


def pools_last_token(model: nn.Module) -> bool:
    """Whether `model` is transformers' own classifier of sequences whose head is `score`."""
    if not isinstance(model, PreTrainedModel) or model.base_model is model:
        return False
    known = own_class(model).__name__ in names_of(CLASSIFIERS)
    return known and isinstance(getattr(model, "score", None), nn.Linear)


class PooledHooks:
    """The hooks of one such model, whose base model `handle` attached."""

    def __init__(self, model: Any, handle: Handle) -> None:
        self._handle, self._base = handle, model.base_model
        self._names = parameter_names(self._base)
        self._seqlen, self._borders = 0, None
        handle.whole_batches = True
        with recorded(handle):
            for one in (model, self._base):
                share_operations(one, handle)
            hooks = (
                self._base.register_forward_pre_hook(self._cut, prepend=True, with_kwargs=True),
                model.score.register_forward_hook(self._whole),
            )
        for hook in hooks:
            handle.undo.callback(hook.remove)

    @eager
    def _cut(
        self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Before the base model: this rank's part of a batch."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if base.training and torch.is_grad_enabled():
            self._handle.compare_first(given)
        refuse_arguments(given)
        if given.get("output_hidden_states"):
            raise NotImplementedError(PARTIAL_STATES)
        self._seqlen = seqlen_of(given)
        batch = {k: v for k, v in given.items() if is_by_token(k, v, self._seqlen)}
        local = self._handle.shard_batch({k: v for k, v in batch.items() if v is not None})
        keep_padding_in_range(base, local, self._seqlen)
        self._borders = local.get("cu_seqlens")
        given = {k: v for k, v in given.items() if k not in batch}
        ours = forward_kwargs(base, local)
        refuse_overwriting(given, ours)
        return (), given | ours

    @eager
    def _whole(self, _: nn.Module, __: Any, scores: Tensor) -> Tensor:
        """(b, S, labels) on every rank. What every rank makes of them counts once."""
        whole = self._handle.sp.unshard(scores, 1, self._borders)
        scale_gradient(whole, self._handle.sp.size)
        return whole[:, : self._seqlen]
