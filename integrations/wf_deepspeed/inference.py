"""What a user calls: deepspeed.init_inference with "hetegen" and "autochunk" in the block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from wf_backends._validation import check_block
from wf_backends.autochunk import autochunk
from wf_backends.hetegen import Handle, dispatch_model
from wf_deepspeed.config import KEY, load_config
from wf_transformers import AUTOCHUNK, ModelOptions, TrainingBudget

HETEGEN = "hetegen"
HETEGEN_KEYS = ("max_memory", "alpha", "pin_memory", "prefetch", "batch", "prompt")


class InferenceEngine:
    """A model with split weights, with the attributes and methods of DeepSpeed's own engine.

    Attributes:
        module: the model; with "autochunk" the chunked model.
        hetegen: the handle, with `plan`, `report()` and `remove()`.
    """

    def __init__(self, module: nn.Module, hetegen: Handle) -> None:
        self.module, self.hetegen = module, hetegen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's `generate`."""
        return self.module.generate(*args, **kwargs)  # type: ignore[operator]

    def destroy(self) -> None:
        """Restore the model."""
        self.hetegen.remove()


def init_inference(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path | None = None,
    device: Any = None,
    **options: Any,
) -> Any:
    """Call `deepspeed.init_inference`, or apply the "wallfacer" block of the configuration.

        {"wallfacer": {"hetegen": {"max_memory": {"0": "20GB", "cpu": "100GB"}, "alpha": "auto",
                                   "pin_memory": true, "prefetch": 1},
                       "autochunk": {"max_memory": "2GB", "max_slowdown": 0.5, "seqlen": 8192}}}

    With "autochunk" the model runs in slices, so that a prompt's activations take less memory. The
    plan is for "seqlen" tokens; by default for the "prompt" of "hetegen", or without "hetegen" for
    as many tokens as the model has positions. Prompts of other lengths are planned at their first
    call. With "hetegen" the weights are split over the accelerator and the host, and DeepSpeed
    makes no engine. Without the block this is deepspeed.init_inference.

    Args:
        model: in evaluation mode; with "hetegen" on the CPU.
        config: a dict or a JSON file.
        device: where "hetegen" runs; None: the accelerator that torch finds.
        options: DeepSpeed's.

    Returns:
        DeepSpeed's engine; with "hetegen" an `InferenceEngine`.

    Raises:
        ValueError: for an unknown key or a wrong value, or as
            `wf_backends.hetegen.dispatch_model` and `wf_backends.autochunk.autochunk`.
        NotImplementedError: for other keys of the block, and for DeepSpeed's own options together
            with "hetegen".
    """
    loaded = load_config({} if config is None else config)
    deepspeed_config = {key: value for key, value in loaded.items() if key != KEY}
    block = loaded.get(KEY, {})
    _check_block(block)
    if device is not None and HETEGEN not in block:
        raise ValueError(f'device={device!r} is for "{KEY}.{HETEGEN}", which is not given')
    budget = ModelOptions.split(block)[1].autochunk
    if HETEGEN not in block:
        engine = deepspeed.init_inference(model, deepspeed_config, **options)
        if budget is not None:
            engine.module = _chunk(engine.module, budget, 1, budget.longest(engine.module))
        return engine
    if deepspeed_config or options:
        raise NotImplementedError(
            f'"{KEY}.{HETEGEN}" makes no engine of DeepSpeed\'s, so that '
            f"{[*deepspeed_config, *options]} would have no effect: leave them out"
        )
    handle = _dispatch(model, block[HETEGEN], device)
    if budget is None:
        return InferenceEngine(model, handle)
    try:
        request = handle.plan.request
        batch = request.decode_tokens
        seqlen = budget.seqlen or request.prefill_tokens // batch
        return InferenceEngine(_chunk(model, budget, batch, seqlen), handle)
    except BaseException:
        handle.remove()
        raise


def _check_block(block: Any) -> None:
    """Refuse a block that is not a mapping, or has keys that are not for inference."""
    if not isinstance(block, Mapping):
        raise ValueError(f'"{KEY}" must be a block {{...}}, got {block!r}')
    others = [key for key in block if key not in (HETEGEN, AUTOCHUNK)]
    if others:
        raise NotImplementedError(
            f'"{KEY}" of init_inference takes "{HETEGEN}" and "{AUTOCHUNK}", got {others}'
        )


def _dispatch(model: nn.Module, block: Any, device: Any) -> Handle:
    """Split the model's weights with the settings of the "hetegen" block."""
    check_block(f"{KEY}.{HETEGEN}", block, HETEGEN_KEYS, '{"max_memory": {"0": "20GB"}}')
    settings = dict(block)
    memory = settings.pop("max_memory", None)
    if not isinstance(memory, Mapping):
        raise ValueError(f'"{HETEGEN}" must have "max_memory": {{"0": "20GB"}}, got {memory!r}')
    return dispatch_model(model, memory, device, **settings)


def _chunk(model: nn.Module, budget: TrainingBudget, batch: int, seqlen: int) -> nn.Module:
    """Return the model under AutoChunk, planned for prompts of (batch, seqlen) tokens."""
    device = next(model.parameters()).device
    ids = torch.zeros(budget.batch_size or batch, seqlen, dtype=torch.int64, device=device)
    inputs = {"input_ids": ids}  # use_cache has the model's default, as in generate
    return autochunk(model.eval(), (), inputs, budget.max_memory, budget.max_slowdown)
