"""Running a rank's program, forward and backward; heads for tokens."""

from wf_backends.runtime.attention import (
    AttentionCall,
    BackwardTiles,
    ForwardTiles,
    RouteAttention,
)
from wf_backends.runtime.autograd import first_order_only, linear_map
from wf_backends.runtime.learned import Learned, with_sinks
from wf_backends.runtime.messages import Messages, accumulator_dtype, add, fuse, scatter
from wf_backends.runtime.shards import dimension, gather_shards, positions, take_shard
from wf_backends.runtime.surrogate_out import SurrogateOut
from wf_backends.runtime.ulysses import (
    HeadExchange,
    HeadGroup,
    gather_rows,
    heads_for_tokens,
    make_head_exchange,
    tokens_for_heads,
)

__all__ = [
    "RouteAttention",
    "BackwardTiles",
    "AttentionCall",
    "ForwardTiles",
    "HeadExchange",
    "HeadGroup",
    "Learned",
    "Messages",
    "SurrogateOut",
    "accumulator_dtype",
    "add",
    "dimension",
    "first_order_only",
    "fuse",
    "gather_rows",
    "gather_shards",
    "heads_for_tokens",
    "make_head_exchange",
    "linear_map",
    "positions",
    "scatter",
    "take_shard",
    "tokens_for_heads",
    "with_sinks",
]
