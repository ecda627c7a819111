"""Positions that a model counts in a way of its own, told to it for this rank's rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from wf_backends import SequenceParallel
from wf_transformers.handle import Handle

Words = dict[str, Any]
Change = Callable[[SequenceParallel, Any, Words], Words]


def tell_positions(model: nn.Module, handle: Handle) -> None:
    """Hooks before the embeddings of RoBERTa's relatives and the rotary ones of Phi-MoE."""
    for module in model.modules():
        for found, change in CHANGES:
            if found(module):
                hook = partial(_told, handle.sp, change)
                undo = module.register_forward_pre_hook(hook, with_kwargs=True)
                handle.undo.callback(undo.remove)


def _told(
    sp: SequenceParallel, change: Change, module: nn.Module, args: tuple[Any, ...], kwargs: Words
) -> tuple[tuple[Any, ...], Words]:
    return args, kwargs | change(sp, module, kwargs)


def _counts_from_padding(module: Any) -> bool:
    """Whether position 0 of a sequence is row `padding_idx + 1` of its table, as in fairseq."""
    return hasattr(module, "create_position_ids_from_inputs_embeds")


def _after_padding(sp: SequenceParallel, module: Any, words: Words) -> Words:
    """Ours count from 0.

    Raises:
        ValueError: on the rank of the first token, if the caller's do not.
    """
    positions = words.get("position_ids")
    if positions is None:
        return {}
    if sp.rank == 0 and int(positions[0, 0]) != 0:
        raise ValueError(
            f"position_ids must count from 0 for a {type(module).__name__} on several ranks, got "
            f"{int(positions[0, 0])} for the first token: leave them out; {module.padding_idx + 1} "
            "is added here"
        )
    return {"position_ids": positions + module.padding_idx + 1}


def _counts_rows(module: Any) -> bool:
    """Whether rotary embeddings are a table of as many positions as there are rows."""
    return type(module).__name__ == "PhimoeRotaryEmbedding"


def _all_rows(sp: SequenceParallel, _: Any, words: Words) -> Words:
    return {"seq_len": words["seq_len"] * sp.size} if "seq_len" in words else {}


CHANGES: tuple[tuple[Callable[[Any], bool], Change], ...] = (
    (_counts_from_padding, _after_padding),
    (_counts_rows, _all_rows),
)
"""Which modules, and what is changed among the keyword arguments of their calls."""
