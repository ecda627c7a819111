"""Corrects the positions of models whose embeddings do not take plain position ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import modeling_rope_utils

from wf_backends import SequenceParallel
from wf_backends._compile import eager
from wf_backends.comm import gather_small
from wf_transformers.attention.llama4 import scale_by_position
from wf_transformers.calls import Kwargs, by_name
from wf_transformers.handle import Handle
from wf_transformers.models import AGREED, varying_rope

ROTARY = ("x", "position_ids", "layer_type")  # parameters of transformers' rotary modules


def correct_positions(model: nn.Module, handle: Handle) -> None:
    """Hook the position embeddings of RoBERTa-like models and rotary ones; on several ranks let
    what follows from positions of the whole sequence do so."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_inputs_embeds"):
            handle.before(module, partial(_add_padding_offset, handle.sp))
        elif type(module).__name__ == "PhimoeRotaryEmbedding":
            handle.before(module, partial(_scale_seq_len, handle))
    if handle.sp.size > 1:
        _agree_on_longest(model, handle)
        scale_by_position(model, handle)


def _agree_on_longest(model: nn.Module, handle: Handle) -> None:
    """Let rotary frequencies that follow from the longest position of a call (rope_type "dynamic",
    "longrope") follow from that of all ranks, in the modules of transformers that update them."""
    varying = [m for m in model.modules() if varying_rope(getattr(m, "config", None))]
    rotary = [module for module in varying if _updates_frequencies(module)]
    for module in varying if rotary else ():
        handle.set(module, AGREED, True)
    for module in rotary:
        handle.before(module, partial(_append_longest, handle.sp))
        handle.after(module, _drop_longest)


def _updates_frequencies(module: nn.Module) -> bool:
    """Whether the forward is decorated by transformers' `dynamic_rope_update`."""
    forward: Any = type(module).forward
    while getattr(forward, "__globals__", forward) not in (None, vars(modeling_rope_utils)):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


@eager
def _append_longest(sp: SequenceParallel, _: Any, args: Any, kwargs: Kwargs) -> Any:
    """Give a rotary module one more token, at the longest position of all ranks."""
    arguments = by_name(ROTARY, args, kwargs)
    positions: Tensor = arguments["position_ids"]  # (b, s), or (3, b, s)
    longest = gather_small(sp.comm, positions.max()).max().expand(*positions.shape[:-1], 1)
    return (), arguments | {"position_ids": torch.cat([positions, longest], dim=-1)}


def _drop_longest(_: Any, __: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Drop the cosines and sines (b, s, d) of that token."""
    return tuple(x[..., :-1, :] for x in output)


@eager
def _add_padding_offset(sp: SequenceParallel, module: Any, args: Any, kwargs: Kwargs) -> Any:
    """Add padding_idx + 1 to the position ids: the table's row of position 0, as in fairseq."""
    positions = kwargs.get("position_ids")
    if positions is None:
        return None
    first = int(gather_small(sp.comm, positions.min()).min())
    if first != 0:
        raise ValueError(
            f"position_ids must count from 0 for a {type(module).__name__} over ranks, got {first} "
            f"for the first token: leave them out; {module.padding_idx + 1} is added here"
        )
    return args, kwargs | {"position_ids": positions + module.padding_idx + 1}


def _scale_seq_len(handle: Handle, _: Any, args: Any, kwargs: Kwargs) -> Any:
    """Make the rotary table as long as the whole sequence, not as this rank's rows."""
    if "seq_len" not in kwargs:
        return None
    cache = handle.attention.cache
    seqlen = kwargs["seq_len"] * handle.sp.size if cache is None else cache.length + cache.new
    return args, kwargs | {"seq_len": seqlen}
