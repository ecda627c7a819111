"""WallFacer as an attention implementation of Hugging Face transformers.

handle = wf_transformers.attach(model, sp)
local = handle.shard_batch(batch)
logits = model(**wf_transformers.forward_kwargs(model, local)).logits
loss = sp.loss(logits, local["labels"])
"""

from wf_backends.parallel import mask_arguments
from wf_transformers.agreement import refuse_different
from wf_transformers.attach import (
    attach_pretrained,
    attach_stages,
    scope_documents,
    without_documents,
)
from wf_transformers.attention.registry import register
from wf_transformers.batch import forward_kwargs
from wf_transformers.comparison.verify import verify
from wf_transformers.entry import apply, attach, attach_model, connect
from wf_transformers.families.media import shard_media
from wf_transformers.families.stacks import shard_between
from wf_transformers.folders.load import model_from_folder
from wf_transformers.generation.cache import ShardedCache
from wf_transformers.generation.entry import generate
from wf_transformers.handle import Handle, data_parallel
from wf_transformers.memory.tiles import AUTOCHUNK, TrainingBudget, plan_tiles
from wf_transformers.models import outermost
from wf_transformers.options import MODEL_KEYS, ModelOptions, attach_by, attach_compared
from wf_transformers.replace import InPlaceOfTorchAttention, temporarily_replace
from wf_transformers.whole_batches.hooks import WholeBatchHooks
from wf_transformers.whole_batches.loaders import counted_by_group

__all__ = [
    "AUTOCHUNK",
    "Handle",
    "InPlaceOfTorchAttention",
    "MODEL_KEYS",
    "ModelOptions",
    "ShardedCache",
    "TrainingBudget",
    "WholeBatchHooks",
    "apply",
    "attach",
    "attach_by",
    "attach_compared",
    "attach_model",
    "attach_pretrained",
    "attach_stages",
    "connect",
    "counted_by_group",
    "data_parallel",
    "forward_kwargs",
    "generate",
    "mask_arguments",
    "model_from_folder",
    "outermost",
    "plan_tiles",
    "refuse_different",
    "register",
    "scope_documents",
    "shard_between",
    "shard_media",
    "temporarily_replace",
    "verify",
    "without_documents",
]
