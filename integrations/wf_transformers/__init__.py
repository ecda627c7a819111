"""WallFacer as an attention implementation of Hugging Face transformers.

registration = wf_transformers.register(sp)
model = AutoModelForCausalLM.from_config(config, attn_implementation="wallfacer")
local = sp.shard_batch(batch)
logits = model(**wf_transformers.forward_kwargs(model, local)).logits
loss = sp.loss(logits, local["labels"])
"""

from wf_transformers.apply import Application, apply, shard_between
from wf_transformers.batch import forward_kwargs
from wf_transformers.connect import connect, connect_each
from wf_transformers.connection import Connection, connect_any
from wf_transformers.models import head_of, outermost
from wf_transformers.registry import Registration, register
from wf_transformers.whole import WholeBatchHooks, loss_only

__all__ = [
    "Application",
    "Connection",
    "Registration",
    "WholeBatchHooks",
    "apply",
    "connect",
    "connect_any",
    "connect_each",
    "forward_kwargs",
    "head_of",
    "loss_only",
    "outermost",
    "register",
    "shard_between",
]
