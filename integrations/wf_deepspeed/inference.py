"""What a user calls: init_inference with "hetegen" and "autochunk" in the "wallfacer" block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from wf_backends._validation import nearest
from wf_backends.autochunk import autochunk
from wf_backends.hetegen import Handle, dispatch_model
from wf_deepspeed.config import KEY, load_config
from wf_transformers import AUTOCHUNK, ModelWords, TrainingBudget

HETEGEN = "hetegen"
KEYS = ("max_memory", "alpha", "pin_memory", "prefetch", "batch", "prompt")


class InferenceEngine:
    """A model whose weights are split, with the names of DeepSpeed's own engine.

    Attributes:
        module: the model, with "autochunk" the one that runs in slices.
        hetegen: the handle, with `plan`, `report()` and `remove()`.
    """

    def __init__(self, module: nn.Module, hetegen: Handle) -> None:
        self.module, self.hetegen = module, hetegen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.module.generate(*args, **kwargs)  # type: ignore[operator]

    def destroy(self) -> None:
        """Put the model back as it was."""
        self.hetegen.remove()


def init_inference(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path | None = None,
    device: Any = None,
    **options: Any,
) -> Any:
    """Take what `deepspeed.init_inference` takes, with the "wallfacer" block understood.

        {"wallfacer": {"hetegen": {"max_memory": {"0": "20GB", "cpu": "100GB"}, "alpha": "auto",
                                   "pin_memory": true, "prefetch": 1},
                       "autochunk": {"max_memory": "2GB", "max_slowdown": 0.5, "seqlen": 8192}}}

    With "autochunk" the activations of a prompt run in slices, planned for "seqlen" tokens, else
    for the longest that the model has positions for, or for the "prompt" of "hetegen"; prompts of
    another length are planned when they come. With "hetegen" the weights are split over the
    accelerator and the host, and no engine of DeepSpeed's is made. Without the block this is
    deepspeed.init_inference.

    Args:
        model: in evaluation mode; with "hetegen" on the CPU.
        config: a dict or a JSON file.
        device: of "hetegen": where it runs; the accelerator that torch finds if not given.
        options: DeepSpeed's.

    Returns:
        DeepSpeed's engine, with "hetegen" an `InferenceEngine`.

    Raises:
        ValueError: for a key that there is not, a value that cannot be meant, or as
            `wf_backends.hetegen.dispatch_model` and `wf_backends.autochunk.autochunk`.
        NotImplementedError: for what else stands in the block, and for DeepSpeed's own options
            beside "hetegen".
    """
    given = load_config({} if config is None else config)
    theirs = {key: value for key, value in given.items() if key != KEY} | options
    if KEY not in given:
        if device is not None:
            raise ValueError(f'device={device!r} is for "{KEY}.{HETEGEN}", which is not given')
        return deepspeed.init_inference(model, theirs)
    block = given[KEY]
    _check(block)
    budget = ModelWords.split(block)[1].autochunk
    if HETEGEN not in block:
        engine = deepspeed.init_inference(model, theirs)
        if budget is not None:
            engine.module = _in_slices(engine.module, budget, 1, budget.longest(engine.module))
        return engine
    if theirs:
        raise NotImplementedError(
            f'"{KEY}.{HETEGEN}" makes no engine of DeepSpeed\'s, which {list(theirs)} are for: '
            "leave them out"
        )
    handle = _dispatch(model, block[HETEGEN], device)
    if budget is None:
        return InferenceEngine(model, handle)
    try:
        request = handle.plan.request
        batch = request.decode_tokens
        seqlen = budget.seqlen or request.prefill_tokens // batch
        return InferenceEngine(_in_slices(model, budget, batch, seqlen), handle)
    except BaseException:
        handle.remove()
        raise


def _check(block: Any) -> None:
    """Refuse what is no block for inference."""
    if not isinstance(block, Mapping):
        raise ValueError(f'"{KEY}" must be a block {{...}}, got {block!r}')
    others = [key for key in block if key not in (HETEGEN, AUTOCHUNK)]
    if others:
        raise NotImplementedError(
            f'"{KEY}" of init_inference takes "{HETEGEN}" and "{AUTOCHUNK}", got {others}'
        )


def _dispatch(model: nn.Module, given: Any, device: Any) -> Handle:
    """The weights split as the words of "hetegen" say."""
    if not isinstance(given, Mapping):
        raise ValueError(f'"{KEY}.{HETEGEN}" must be a block {{...}}, got {given!r}')
    words = dict(given)
    for key in words:
        if key not in KEYS:
            raise ValueError(
                f'"{HETEGEN}" may have the keys {list(KEYS)}, got {key!r}{nearest(key, KEYS)}'
            )
    memory = words.pop("max_memory", None)
    if not isinstance(memory, Mapping):
        raise ValueError(f'"{HETEGEN}" must have "max_memory": {{"0": "20GB"}}, got {memory!r}')
    return dispatch_model(model, memory, device, **words)


def _in_slices(model: nn.Module, budget: TrainingBudget, batch: int, seqlen: int) -> nn.Module:
    """The model with the activations of a prompt in slices."""
    device = next(model.parameters()).device
    ids = torch.zeros(batch, seqlen, dtype=torch.int64, device=device)
    words = {"input_ids": ids}  # with a cache where the model makes one, as generate has it
    return autochunk(model.eval(), (), words, budget.max_memory, budget.max_slowdown)
