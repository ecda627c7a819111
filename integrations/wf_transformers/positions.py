"""Positions that a model counts in a way of its own, told to it for this rank's rows."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from wf_backends import SequenceParallel
from wf_transformers.handle import Handle

Words = dict[str, Any]


def tell_positions(model: nn.Module, handle: Handle) -> None:
    """Hooks before the embeddings of RoBERTa's relatives and the rotary ones of Phi-MoE."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_inputs_embeds"):
            hook = partial(_after_padding, handle.sp)
        elif type(module).__name__ == "PhimoeRotaryEmbedding":
            hook = partial(_of_all_rows, handle.sp)
        else:
            continue
        handle.hooks(module.register_forward_pre_hook(hook, with_kwargs=True))


def _after_padding(sp: SequenceParallel, module: Any, args: Any, kwargs: Words) -> Any:
    """Position 0 of a sequence is row `padding_idx + 1` of the table, as in fairseq.

    Raises:
        ValueError: on the rank of the first token, if the caller's do not count from 0.
    """
    positions = kwargs.get("position_ids")
    if positions is None:
        return None
    if sp.rank == 0 and int(positions[0, 0]) != 0:
        raise ValueError(
            f"position_ids must count from 0 for a {type(module).__name__} on several ranks, got "
            f"{int(positions[0, 0])} for the first token: leave them out; {module.padding_idx + 1} "
            "is added here"
        )
    return args, kwargs | {"position_ids": positions + module.padding_idx + 1}


def _of_all_rows(sp: SequenceParallel, _: Any, args: Any, kwargs: Words) -> Any:
    """The rotary embeddings are a table of as many positions as there are rows."""
    known = "seq_len" in kwargs
    return (args, kwargs | {"seq_len": kwargs["seq_len"] * sp.size}) if known else None
