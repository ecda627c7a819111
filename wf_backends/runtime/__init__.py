"""Running a rank's program, forward and backward; heads for tokens."""

from wf_backends.runtime.attention import (
    AttentionCall,
    BackwardTiles,
    ForwardTiles,
    RouteAttention,
)
from wf_backends.runtime.autograd import first_order_only, linear_map
from wf_backends.runtime.learned import Learned, sinks_grad, with_sinks
from wf_backends.runtime.messages import Messages, accumulator_dtype, add, fuse, scatter
from wf_backends.runtime.shards import dimension, gather_shards, positions, take_shard
from wf_backends.runtime.surrogate_out import SurrogateOut
from wf_backends.runtime.ulysses import HeadGroup, gather_rows, make_head_exchange

__all__ = [
    "RouteAttention",
    "BackwardTiles",
    "AttentionCall",
    "ForwardTiles",
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
    "make_head_exchange",
    "linear_map",
    "positions",
    "scatter",
    "sinks_grad",
    "take_shard",
    "with_sinks",
]
