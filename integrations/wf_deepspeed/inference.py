"""What a user calls: init_inference with "hetegen" and "autochunk" in the "wallfacer" block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    model: nn.Module, config: Mapping[str, Any] | str | Path, device: Any = None
) -> InferenceEngine:
    """Split a model's weights over the accelerator and the host, as the configuration says.

        {"wallfacer": {"hetegen": {"max_memory": {"0": "20GB", "cpu": "100GB"}, "alpha": "auto",
                                   "pin_memory": true, "prefetch": 1},
                       "autochunk": {"max_memory": "2GB", "max_slowdown": 0.5, "seqlen": 8192}}}

    With "autochunk" the activations of a prompt run in slices, planned for "seqlen" tokens, else
    for the "prompt" of "hetegen"; prompts of another length are planned when they come.

    Args:
        model: on the CPU.
        config: a dict or a JSON file.
        device: where it runs; the accelerator that torch finds if not given.

    Raises:
        ValueError: for a block without "hetegen", a key that there is not, or as
            `wf_backends.hetegen.dispatch_model` and `wf_backends.autochunk.autochunk`.
        NotImplementedError: for what else stands in the block.
    """
    given = load_config(config if isinstance(config, Mapping) else str(config))
    block = given.get(KEY)
    if not isinstance(block, Mapping) or not isinstance(block.get(HETEGEN), Mapping):
        raise ValueError(f'config must have "{KEY}": {{"{HETEGEN}": {{...}}}}, got {block!r}')
    others = [key for key in block if key not in (HETEGEN, AUTOCHUNK)]
    if others:
        raise NotImplementedError(
            f'"{KEY}" of init_inference takes "{HETEGEN}" and "{AUTOCHUNK}", got {others}'
        )
    budget = ModelWords.split(block)[1].autochunk
    words = dict(block[HETEGEN])
    for key in words:
        if key not in KEYS:
            raise ValueError(
                f'"{HETEGEN}" may have the keys {list(KEYS)}, got {key!r}{nearest(key, KEYS)}'
            )
    memory = words.pop("max_memory", None)
    if not isinstance(memory, Mapping):
        raise ValueError(f'"{HETEGEN}" must have "max_memory": {{"0": "20GB"}}, got {memory!r}')
    handle = dispatch_model(model, memory, device, **words)
    if budget is None:
        return InferenceEngine(model, handle)
    try:
        return InferenceEngine(_in_slices(model, budget, handle), handle)
    except BaseException:
        handle.remove()
        raise


def _in_slices(model: nn.Module, budget: TrainingBudget, handle: Handle) -> nn.Module:
    """The split model with the activations of a prompt in slices."""
    request = handle.plan.request
    batch = request.decode_tokens
    sizes = batch, budget.seqlen or request.prefill_tokens // batch
    ids = torch.zeros(sizes, dtype=torch.int64, device=next(model.parameters()).device)
    words = {"input_ids": ids, "use_cache": False}
    return autochunk(model, (), words, budget.max_memory, budget.max_slowdown)
