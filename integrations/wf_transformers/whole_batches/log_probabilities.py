"""Models whose trainers make a loss of log-probabilities: those of TRL (DPO, GRPO and others).

Those of TRL 0.19 make them of logits: called with whole batches and without labels, the model gives
`ShardedLogits`. Those of TRL 1.16 have a fused LM head that gives them (see own_loss.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from wf_backends._compile import eager
from wf_transformers.calls import by_name, tokens_of
from wf_transformers.handle import Handle
from wf_transformers.models import outermost, own_class
from wf_transformers.replace import temporarily_replace
from wf_transformers.whole_batches.arguments import is_by_token, keep_padding_in_range, seqlen_of
from wf_transformers.whole_batches.call import Call
from wf_transformers.whole_batches.hooks import WHOLE_LOGITS, WholeBatchHooks
from wf_transformers.whole_batches.own_loss import FUSED, has_fused_head
from wf_transformers.whole_batches.sharded_logits import (
    LocalStates,
    Rows,
    ShardedLogits,
    log_softmax_of,
    rolled,
)

LOG_SOFTMAX = "selective_log_softmax"
"""TRL's function of (logits, index), which its trainers' files import."""
CALLERS = ("concatenated_forward", "_get_per_token_logps")
"""Methods of its trainers that call it, of DPO's (CPO's, ORPO's) and of GRPO's."""
COUNT_VALID = ("OPTLearnedPositionalEmbedding",)
"""Modules that number valid tokens. Others number padding, too, where nobody tells positions."""
KEPT = ("logits_to_keep", "num_logits_to_keep")


def makes_log_probabilities(trainer: Any) -> bool:
    """Whether a trainer is such a one of TRL: it has one of CALLERS, or a fused head and a
    reference model (which may be None)."""
    if any(hasattr(trainer, name) for name in CALLERS):
        return bool(_files(type(trainer)))
    return hasattr(trainer, "ref_model") and any(map(has_fused_head, outermost(trainer.model)))


def take_sharded_logits(trainer: Any, handle: Handle) -> None:
    """Have a trainer's log-probabilities made of `ShardedLogits`, until `handle` is removed."""
    call = partial(_with_log_softmax, _files(type(trainer)))
    for name in CALLERS:
        if hasattr(trainer, name):
            handle.undo.enter_context(temporarily_replace(trainer, name, call))


def _files(trainer: type) -> list[ModuleType]:
    files = (sys.modules[kind.__module__] for kind in trainer.__mro__)
    return [one for one in files if one.__name__.startswith("trl.") and hasattr(one, LOG_SOFTMAX)]


def _with_log_softmax(
    files: list[ModuleType], method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A method of a trainer, with `log_softmax_of` for TRL's function while it runs."""
    with ExitStack() as stack:
        for file in files:
            stack.enter_context(temporarily_replace(file, LOG_SOFTMAX, log_softmax_of))
        return method(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call asked for."""

    starts: Tensor
    """(b,) tokens of padding on the left."""
    tokens: slice
    """Of which tokens it wants logits."""
    states: bool
    """Whether it wants hidden states."""


class LogProbabilityHooks(WholeBatchHooks):
    """`WholeBatchHooks` of a model that is called for log-probabilities.

    Without labels it gives `ShardedLogits`, by a fused head values by token. Padding may be on the
    left there: it is moved behind the sample. Positions are what they are on one device, where most
    models count padding.
    """

    whole_without_labels = False
    compares_first = False
    _asked: Asked | None = None

    @eager
    def _before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        given = by_name(self._names, args, kwargs)
        self._asked, fused = None, bool(given.get(FUSED))
        told = given.get("labels") is not None or given.get(WHOLE_LOGITS) is not None
        if told and not fused:
            return super()._before(model, (), given)
        keep = next((given[key] for key in KEPT if given.get(key)), 0)
        given = {key: value for key, value in given.items() if key not in KEPT}
        states = bool(given.pop("output_hidden_states", False))
        starts = padding_on_the_left(given)
        counted = given.get("position_ids") is None and not _counts_valid(model)
        given = _moved(given, starts) | ({} if fused else {WHOLE_LOGITS: False})
        _, words = super()._before(model, (), given)
        if counted and isinstance(words.get("position_ids"), Tensor):
            words["position_ids"] = words["position_ids"] + starts[:, None]
            keep_padding_in_range(model, words, seqlen_of(given))
        self._asked = Asked(starts, slice(-keep, None) if keep else slice(None), states)
        return (), words

    @eager
    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call, asked = self._call, self._asked
        output = super()._after(model, args, output)
        if asked is None or call is None or call.fused:
            return output
        whole, mine = partial(self._whole, call=call), partial(self._mine, call=call)
        rows = Rows(whole, mine, asked.starts, call.seqlen)
        logits = ShardedLogits(output["logits"], rows, range(call.seqlen)[asked.tokens])
        fields = dict(output) | {"logits": logits}
        return type(output)(**fields | ({"hidden_states": LocalStates()} if asked.states else {}))

    def _whole(self, x: Tensor, call: Call) -> Tensor:
        """(b, S, ...): rows of all ranks; by a fused head in the order of the caller's batch."""
        found = super()._whole(x, call)
        return rolled(found, -self._asked.starts) if call.fused and self._asked else found

    def _mine(self, x: Tensor, call: Call) -> Tensor:
        """(b, s): this rank's rows of (b, S)."""
        sp, borders = self.handle.sp, call.local.get("cu_seqlens")
        padding = sp.size * seqlen_of(call.local) - call.seqlen
        return sp.shard(pad(x, (0, padding)), 1, borders)


def _counts_valid(model: nn.Module) -> bool:
    return any(own_class(module).__name__ in COUNT_VALID for module in model.modules())


def padding_on_the_left(given: Mapping[str, Any]) -> Tensor:
    """(b,) int64: how many tokens of padding each sample begins with."""
    mask, tokens = given.get("attention_mask"), tokens_of(given)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return (mask != 0).int().argmax(dim=1)
    if tokens is None:
        return torch.zeros(1, dtype=torch.int64)
    return torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)


def _moved(given: Mapping[str, Any], starts: Tensor) -> dict[str, Any]:
    """A call's arguments with all padding on the right."""
    seqlen = seqlen_of(given)

    def moves(key: str, value: Any) -> bool:
        return isinstance(value, Tensor) and is_by_token(key, value, seqlen)

    return {k: rolled(v, starts) if moves(k, v) else v for k, v in given.items()}


class Rollout:
    """The whole model beside one that is spread, for completions that a trainer has it generate.

    A KV cache cannot be spread. So a second tree of modules over the same parameters, made before
    the model is attached, generates. The ranks of a sequence draw alike and so generate the same.

    Args:
        model: before it is attached.
    """

    def __init__(self, model: Any) -> None:
        shared = chain(model.parameters(), model.buffers())
        self._model, self._alone = model, deepcopy(model, {id(x): x for x in shared})
        for one in filter(has_fused_head, outermost(self._alone)):
            del one.forward  # it calls the forward of `model`

    def take_over(self, handle: Handle) -> None:
        """`model.generate` is the whole model's, until `handle` is removed."""
        handle.set(self._model, "generate", self.generate)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What `generate` of the model alone gives, with the parameters as they are now."""
        for one, its in zip(self._alone.modules(), self._model.modules(), strict=True):
            _share(one, its)
        self._alone.generation_config = self._model.generation_config
        return self._alone.generate(*args, **kwargs)


def _share(one: nn.Module, its: nn.Module) -> None:
    """The same parameters, buffers and mode: a move to a device replaces buffers."""
    one._parameters, one._buffers, one.training = its._parameters, its._buffers, its.training
