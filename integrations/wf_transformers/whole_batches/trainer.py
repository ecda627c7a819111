"""What runs in place of methods of the Trainer of transformers whose model takes whole batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

from torch import nn

from wf_backends.parallel import IGNORE_INDEX
from wf_transformers.comparison.runs import LOSS
from wf_transformers.whole_batches.hooks import WHOLE_LOGITS, WholeBatchHooks


def loss_only(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Instead of the Trainer's `prediction_step`: logits that it drops are not brought together.

    A model without the hooks is called as ever.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    if call.arguments["prediction_loss_only"] and _hooks_on(call.arguments["model"]):
        call.arguments["inputs"] = {**call.arguments["inputs"], WHOLE_LOGITS: False}
    return original(*call.args, **call.kwargs)


def counted_once(trainer: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Instead of the Trainer's own `compute_loss`: a group counts as one process.

    Under `average_tokens_across_devices` the Trainer sums labels over all processes and multiplies
    the loss by their number. What is no mean over these labels would become too large.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    num_items = call.arguments.get("num_items_in_batch")
    hooks = _hooks_on(call.arguments["model"])
    size = hooks.size if hooks else 1
    multiplies = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    average = getattr(trainer.args, "average_tokens_across_devices", False)
    if size == 1 or num_items is None or not (average and multiplies):
        return original(*args, **kwargs)
    call.arguments["num_items_in_batch"] = num_items // size
    found = original(*call.args, **call.kwargs)
    return (found[0] / size, *found[1:]) if isinstance(found, tuple) else found / size


def compared_first(
    trainer: Any, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Instead of the Trainer's `training_step`: before the first one its loss is compared."""
    hooks = _hooks_on(model)
    if hooks is not None and hooks.compares_first and hooks.handle.awaits_first:
        counted = (args[0] if args else kwargs.get("num_items_in_batch")) is not None
        with _same_counts(trainer):
            given = trainer._prepare_inputs(inputs)
            loss = partial(_loss, trainer, hooks, counted)
            hooks.handle.compare_first(given, call=loss)
    return original(model, inputs, *args, **kwargs)


def _loss(
    trainer: Any, hooks: WholeBatchHooks, counted: bool, given: Mapping[str, Any], alone: bool
) -> dict[str, Any]:
    """What a step's loss is; alone, in a job of one process for each sequence at a time."""
    state = trainer.accelerator.state
    ranks, words = state.num_processes, {}
    state.num_processes = ranks // hooks.size if alone else ranks
    if counted:
        average = getattr(trainer.args, "average_tokens_across_devices", False)
        count = (given["labels"] != IGNORE_INDEX).sum()
        words["num_items_in_batch"] = count * state.num_processes if average else count
    try:
        with trainer.compute_loss_context_manager():
            return {LOSS: trainer.compute_loss(hooks.model, dict(given), **words)}
    finally:
        state.num_processes = ranks


@contextmanager
def _same_counts(trainer: Any) -> Iterator[None]:
    """Afterwards, what a Trainer counts and keeps for its log is as before."""
    kept = {key: deepcopy(x) for key, x in vars(trainer).items() if _is_plain(x)}
    try:
        yield
    finally:
        vars(trainer).update(kept)


def _is_plain(x: Any) -> bool:
    items = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    return isinstance(x, dict | list | tuple | int | float | str) and all(map(_is_plain, items))


def _hooks_on(model: nn.Module) -> WholeBatchHooks | None:
    """The hooks that are on the model, or on one inside a wrapper."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((owner for owner in owners if isinstance(owner, WholeBatchHooks)), None)
