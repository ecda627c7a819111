"""The option "autochunk": training under a memory budget, see `wf_backends.autochunk.tiling`.

    "autochunk": {"max_memory": "8GB", "max_slowdown": 0.1, "seqlen": 65536, "batch_size": 1}

The plan is made on the unchanged model, for a rank's share of "batch_size" samples of "seqlen"
tokens. Its modules are tiled after the model is attached and before an engine wraps it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from wf_backends._validation import check_block, positive
from wf_backends.autochunk.graph import checked_budget
from wf_backends.autochunk.tiling import TiledCall, TrainingPlan, apply_training, plan_training
from wf_transformers.calls import parameter_names
from wf_transformers.handle import Handle
from wf_transformers.memory.checkpoints import Checkpointing, in_planned_training
from wf_transformers.models import head_of, outermost, without_peft

AUTOCHUNK = "autochunk"
LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    """The memory that a rank's activations may take in a training step."""

    max_memory: int | float | None = None
    """Bytes, or as a float a share of the memory without tiles. None: as little as possible."""
    max_slowdown: float = 0.1
    """The largest share of a step's operations that may be computed twice."""
    seqlen: int | None = None
    """Tokens of the longest whole sequence. None: the model's `max_position_embeddings`."""
    batch_size: int | None = None
    """Sequences of a micro-batch. None: as the engine's config says, or 1."""

    @classmethod
    def from_dict(cls, options: Any) -> TrainingBudget:
        """From the value of "autochunk"."""
        known = [field.name for field in fields(cls)]
        check_block(AUTOCHUNK, options, known, '{"max_memory": "8GB"}')
        for key in ("seqlen", "batch_size"):
            if options.get(key) is not None:
                positive(f'"{AUTOCHUNK}.{key}"', options[key])
        slowdown = options.get("max_slowdown", cls().max_slowdown)
        budget = checked_budget(options.get("max_memory"), slowdown, f'"{AUTOCHUNK}.max_{{}}"')
        return cls(budget.memory, budget.slowdown, options.get("seqlen"), options.get("batch_size"))

    def longest(self, model: nn.Module) -> int:
        """Tokens of the longest sequence for `model`."""
        config = getattr(model, "config", None)
        seqlen = self.seqlen or getattr(config, "max_position_embeddings", None)
        if seqlen is None:
            raise ValueError(
                f'"{AUTOCHUNK}.seqlen" must be given: the model has no longest sequence'
            )
        return seqlen


def plan_tiles(
    model: nn.Module,
    budget: TrainingBudget | None,
    ranks: int,
    labelled: bool = False,
    checkpointing: Checkpointing | None = None,
) -> TrainingPlan | None:
    """Plan which modules of a Hugging Face model to tile, before it is attached.

    Args:
        model: may have PEFT's adapters.
        ranks: how many ranks share a sequence.
        labelled: whether the model is called with labels, and so computes the loss itself.
        checkpointing: of its activations, once it is attached.
    """
    if budget is None:
        return None
    model = without_peft(model)
    _refuse_plan(model)
    device = next(model.parameters()).device
    shape = budget.batch_size or 1, -(-budget.longest(model) // ranks)
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    arguments: dict[str, Any] = {"input_ids": ids}
    arguments |= {"use_cache": False} if "use_cache" in parameter_names(model) else {}
    arguments |= {"labels": ids.clone()} if labelled and head_of(model) == "causal" else {}
    with in_planned_training(model, checkpointing):
        return plan_training(model, (), arguments, budget.max_memory, budget.max_slowdown)


def _refuse_plan(model: nn.Module) -> None:
    """Refuse a model of which a plan for "input_ids" and whole parameters would say too little."""
    models = outermost(model)
    if models != [model] or models[0].main_input_name != "input_ids":
        raise NotImplementedError(
            f'"{AUTOCHUNK}" needs a Hugging Face model that takes "input_ids", and '
            f"{type(model).__name__} is none: call plan_training of wf_backends.autochunk.tiling"
        )
    if "decoder_input_ids" in parameter_names(model):
        raise NotImplementedError(
            f'"{AUTOCHUNK}" plans for "input_ids" alone, and {type(model).__name__} takes '
            '"decoder_input_ids" too, of a length that it does not know: leave it out'
        )
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        raise NotImplementedError(
            f'"{AUTOCHUNK}" plans on whole parameters: build the model outside deepspeed.zero.Init'
        )


def apply_tiles(model: nn.Module, handle: Handle, plan: TrainingPlan | None) -> None:
    """Tile the modules of `plan` until `handle.remove()`."""
    if plan is not None:
        LOG.info(plan.explain())
        model = without_peft(model)
        handle.undo.callback(apply_training(model, plan).remove)
        recompute_with_documents(model, handle)


def recompute_with_documents(model: nn.Module, handle: Handle) -> None:
    """Let layers in tiles of samples know their documents when they are computed again."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, TiledCall):
            handle.set(forward, "contexts", (handle.attention.documents.recomputing,))
