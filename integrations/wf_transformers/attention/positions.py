"""Corrects the positions of models whose embeddings do not take plain position ids."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from wf_backends import SequenceParallel
from wf_transformers.handle import Handle

Kwargs = dict[str, Any]


def offset_positions(model: nn.Module, handle: Handle) -> None:
    """Hook the position embeddings of RoBERTa-like models and the rotary ones of Phi-MoE."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_inputs_embeds"):
            hook = partial(_add_padding_offset, handle.sp)
        elif type(module).__name__ == "PhimoeRotaryEmbedding":
            hook = partial(_scale_seq_len, handle)
        else:
            continue
        handle.hooks(module.register_forward_pre_hook(hook, with_kwargs=True))


def _add_padding_offset(sp: SequenceParallel, module: Any, args: Any, kwargs: Kwargs) -> Any:
    """Add padding_idx + 1 to the position ids: the table's row of position 0, as in fairseq.

    Raises:
        ValueError: on the rank of the first token, if the caller's ids do not start at 0.
    """
    positions = kwargs.get("position_ids")
    if positions is None:
        return None
    if sp.rank == 0 and int(positions[0, 0]) != 0:
        raise ValueError(
            f"position_ids must count from 0 for a {type(module).__name__} over ranks, got "
            f"{int(positions[0, 0])} for the first token: leave them out; {module.padding_idx + 1} "
            "is added here"
        )
    return args, kwargs | {"position_ids": positions + module.padding_idx + 1}


def _scale_seq_len(handle: Handle, _: Any, args: Any, kwargs: Kwargs) -> Any:
    """Make the rotary table as long as the whole sequence, not as this rank's rows."""
    if "seq_len" not in kwargs:
        return None
    cache = handle.attention.cache
    seqlen = kwargs["seq_len"] * handle.sp.size if cache is None else cache.length + cache.new
    return args, kwargs | {"seq_len": seqlen}
