"""Models of TRL's trainers that compute a loss from log-probabilities (DPO, GRPO and others).

Trainers of TRL before 1.15 compute them from logits: the model, called with whole batches and
without labels, returns `ShardedLogits`. Since 1.15 a fused LM head returns them: custom_loss.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

from torch import Tensor, nn

from wf_backends._compile import eager
from wf_transformers.calls import LOGITS_TO_KEEP, Kwargs, by_name
from wf_transformers.comparison.changes import Changes
from wf_transformers.handle import Handle
from wf_transformers.models import has_module, outermost
from wf_transformers.replace import temporarily_replace
from wf_transformers.whole_batches.arguments import (
    BatchCall,
    has_row_per_token,
    mask_of_ones,
    seqlen_of,
)
from wf_transformers.whole_batches.custom_loss import FUSED_HEAD, has_fused_head
from wf_transformers.whole_batches.hooks import WHOLE_LOGITS, WholeBatchHooks
from wf_transformers.whole_batches.sharded_logits import (
    LocalStates,
    entropies_of,
    log_softmax_of,
    rolled,
)

FUNCTIONS = MappingProxyType(
    {"selective_log_softmax": log_softmax_of, "entropy_from_logits": entropies_of}
)
"""TRL's functions of logits, which its trainers' files import, and what takes `ShardedLogits`."""
CALLERS = (
    "concatenated_forward",  # DPO before 0.29
    "compute_ref_log_probs",  # DPO since 0.29, KTO since 1.9
    "get_batch_logps",  # CPO, ORPO, KTO
    "_get_per_token_logps",  # GRPO of 0.19
    "_get_per_token_logps_and_entropies",  # GRPO since 0.20, RLOO
)
"""Methods of trainers that call them, also outside of `compute_loss`."""
COUNTS_VALID_TOKENS = "OPTLearnedPositionalEmbedding"
"""A module that gives positions to valid tokens only. Without position_ids others count padding."""


def makes_log_probabilities(trainer: Any) -> bool:
    """Whether a trainer of TRL computes its loss from log-probabilities: it has a method of
    CALLERS, or a fused head and a reference model (which may be None)."""
    if _files(type(trainer)) and any(hasattr(trainer, name) for name in CALLERS):
        return True
    return hasattr(trainer, "ref_model") and any(map(has_fused_head, outermost(trainer.model)))


def take_sharded_logits(trainer: Any, handle: Handle) -> None:
    """Let a trainer compute log-probabilities from `ShardedLogits`, until `handle.remove()`."""
    for name in CALLERS:
        if hasattr(trainer, name):
            handle.replace(trainer, name, partial(with_sharded_logits, trainer))


def with_sharded_logits(trainer: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method of a trainer, with functions that take `ShardedLogits` in place of TRL's."""
    with ExitStack() as stack:
        for file in _files(type(trainer)):
            for name in FUNCTIONS.keys() & vars(file).keys():
                stack.enter_context(temporarily_replace(file, name, FUNCTIONS[name]))
        return method(*args, **kwargs)


def _files(trainer_class: type) -> list[ModuleType]:
    """The files of TRL with the class or a base of it that import TRL's functions of logits."""
    names = {cls.__module__ for cls in trainer_class.__mro__ if cls.__module__.startswith("trl.")}
    files = (module for name in names if (module := sys.modules.get(name)))
    return [file for file in files if FUNCTIONS.keys() & vars(file).keys()]


class LogProbabilityHooks(WholeBatchHooks):
    """`WholeBatchHooks` of a model that is called for log-probabilities.

    Without labels the model returns `ShardedLogits`, or the values of a fused head for every token.
    Padding may be on the left: it is moved to the right of each sample. Positions are those of one
    device, where most models count padding. With `whole_without_labels` all is as in the base.
    """

    whole_without_labels = False

    @eager
    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
        arguments = by_name(self._names, args, kwargs)
        if self.whole_without_labels:
            return super()._before(model, (), arguments)
        if arguments.get(FUSED_HEAD):
            return self._before_log_probabilities(model, arguments)
        if arguments.get("labels") is not None or arguments.get(WHOLE_LOGITS) is not None:
            return super()._before(model, (), arguments)
        if self.always_whole or any(map(has_fused_head, outermost(model))):
            # for compute_metrics: all else of a model with a fused head is by the head
            return super()._before(model, (), arguments | {WHOLE_LOGITS: True})
        return self._before_log_probabilities(model, arguments | {WHOLE_LOGITS: "hidden"})

    def _before_log_probabilities(self, model: nn.Module, arguments: Kwargs) -> Any:
        """Move padding to the right, cut the batch, and keep what the output must have."""
        keep = next((arguments[key] for key in LOGITS_TO_KEEP if arguments.get(key)), 0)
        arguments = {key: value for key, value in arguments.items() if key not in LOGITS_TO_KEEP}
        hidden_states = bool(arguments.pop("output_hidden_states", False))
        starts, seqlen = padding_on_the_left(arguments), seqlen_of(arguments)
        counts_all = not has_module(model, COUNTS_VALID_TOKENS)
        counts_padding = arguments.get("position_ids") is None and counts_all
        for key, x in arguments.items():
            if isinstance(x, Tensor) and has_row_per_token(key, x, seqlen):
                arguments[key] = rolled(x, starts)
        _, kwargs = super()._before(model, (), arguments)
        if counts_padding and isinstance(kwargs.get("position_ids"), Tensor):
            positions = kwargs["position_ids"] + starts[:, None]
            kwargs["position_ids"] = positions.clamp(max=seqlen - 1)
        assert self._call is not None, "set by the base"
        self._call.starts, self._call.num_kept = starts, keep
        self._call.hidden_states = hidden_states
        return (), kwargs

    @eager
    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call = self._call
        output = super()._after(model, args, output)
        if call is None or not call.hidden_states or call.loss == "fused_head":
            return output
        return type(output)(**{**output, "hidden_states": LocalStates()})

    def _whole(self, x: Tensor, call: BatchCall) -> Tensor:
        """The rows of all ranks; those of a fused head in the order of the caller's batch."""
        whole = super()._whole(x, call)
        if call.loss == "fused_head" and call.starts is not None:
            return rolled(whole, -call.starts)
        return whole


def padding_on_the_left(arguments: Mapping[str, Any]) -> Tensor:
    """(b,) int64: how many tokens of padding each sample begins with."""
    mask = arguments.get("attention_mask")
    is_padding = isinstance(mask, Tensor) and mask.dim() == 2
    mask = mask if is_padding else mask_of_ones(arguments)
    return (mask != 0).int().argmax(dim=1)


def generate_alone(model: nn.Module, handle: Handle, changes: Changes) -> None:
    """Let every rank of a sequence generate by itself, until `handle.remove()`: inside `generate`
    of the Hugging Face models in `model` they are as they were before they were attached.

    The ranks of a sequence have the same random state and so generate the same tokens.

    Args:
        changes: what attaching `model` changed.
    """

    def generate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with changes.undone():
            return original(*args, **kwargs)

    for inner in outermost(model):
        if hasattr(inner, "generate"):
            handle.replace(inner, "generate", generate)


def hooks_on(model: nn.Module) -> WholeBatchHooks | None:
    """The hooks of the model, or of a model inside a wrapper."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((owner for owner in owners if isinstance(owner, WholeBatchHooks)), None)
