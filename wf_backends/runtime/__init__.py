"""Running a rank's program, forward and backward; heads for tokens."""

from wf_backends.runtime.attention import (
    Attention,
    BackwardWork,
    Call,
    ForwardWork,
    accumulator_dtype,
)
from wf_backends.runtime.messages import SPAN, Home, Mail, Tensors, add, bring_together, send_home
from wf_backends.runtime.shards import dimension, gather_shards, positions, take_shard
from wf_backends.runtime.surrogate_out import Outputs
from wf_backends.runtime.ulysses import Exchange, heads_for_tokens, make_exchange, tokens_for_heads
from wf_backends.runtime.ulysses_pipeline import ChunkedAttention, ChunkedCall

__all__ = [
    "Attention",
    "BackwardWork",
    "Call",
    "ChunkedAttention",
    "ChunkedCall",
    "Exchange",
    "ForwardWork",
    "Home",
    "Mail",
    "Outputs",
    "SPAN",
    "Tensors",
    "accumulator_dtype",
    "add",
    "bring_together",
    "dimension",
    "gather_shards",
    "heads_for_tokens",
    "make_exchange",
    "positions",
    "send_home",
    "take_shard",
    "tokens_for_heads",
]
