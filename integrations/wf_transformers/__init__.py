"""WallFacer as an attention implementation of Hugging Face transformers.

handle = wf_transformers.attach(model, sp)
local = handle.shard_batch(batch)
logits = model(**wf_transformers.forward_kwargs(model, local)).logits
loss = sp.loss(logits, local["labels"])
"""

from wf_transformers.attach import (
    attach_pretrained,
    attach_stages,
    scope_documents,
    without_documents,
)
from wf_transformers.batch import forward_kwargs
from wf_transformers.checkpoints import (
    CHECKPOINTING,
    Checkpointing,
    checkpoint_activations,
    split_words,
)
from wf_transformers.entry import apply, attach, connect, connect_any
from wf_transformers.folder import model_from_folder
from wf_transformers.handle import Handle, data_parallel
from wf_transformers.hooks import WholeBatchHooks
from wf_transformers.loaders import counted_by_group
from wf_transformers.models import head_of, outermost
from wf_transformers.registry import register
from wf_transformers.replace import temporarily_replace
from wf_transformers.stacks import shard_between
from wf_transformers.tiles import (
    AUTOCHUNK,
    TrainingBudget,
    apply_tiles,
    plan_tiles,
    split_budget,
)
from wf_transformers.trainer import counted_once, loss_only
from wf_transformers.verify import verify

__all__ = [
    "AUTOCHUNK",
    "CHECKPOINTING",
    "Checkpointing",
    "Handle",
    "TrainingBudget",
    "WholeBatchHooks",
    "apply",
    "apply_tiles",
    "attach",
    "attach_pretrained",
    "attach_stages",
    "checkpoint_activations",
    "connect",
    "connect_any",
    "counted_by_group",
    "counted_once",
    "data_parallel",
    "forward_kwargs",
    "head_of",
    "loss_only",
    "model_from_folder",
    "outermost",
    "plan_tiles",
    "register",
    "scope_documents",
    "shard_between",
    "split_budget",
    "split_words",
    "temporarily_replace",
    "verify",
    "without_documents",
]
