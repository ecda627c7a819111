"""Dynamic sequence parallelism from the key "dsp" of a configuration.

Every rank calls the model with the same whole batch and computes the same whole loss. The mean of
the parameter gradients over the ranks, as data parallelism takes it, is the gradient of one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from wf_backends._validation import check_keys
from wf_backends.dsp.first_forward import RECEIVER, FirstForward, Mode, receivers
from wf_backends.dsp.layout_tracker import LayoutTracker
from wf_backends.dsp.stages import Stages
from wf_backends.dsp.switch import DynamicSequenceParallel
from wf_backends.parallel import SequenceParallel, SequenceParallelConfig

KEY = "dsp"
LAYOUT = "contiguous"  # of a sharded dimension


def read_block(
    block: Mapping[str, Any], other_keys: Sequence[str] = ()
) -> tuple[SequenceParallelConfig, Stages | None]:
    """The config from the keys of `block` without "dsp", and the `Stages` from "dsp", if given.

    Args:
        other_keys: as in `SequenceParallelConfig.from_dict`.

    Raises:
        ValueError: for a key of either that is unknown or has a wrong value, or a layout beside
            "dsp" that is not "contiguous".
    """
    attention_block = {key: value for key, value in block.items() if key != KEY}
    other_keys = (KEY, *other_keys)
    if KEY not in block:
        return SequenceParallelConfig.from_dict(attention_block, other_keys), None
    known = [field.name for field in fields(Stages)]
    stages_block = check_keys(f'"{KEY}"', block[KEY], known, optional=("needs",))
    try:
        stages = Stages(**stages_block)
    except ValueError as error:
        raise ValueError(f'"{KEY}": {error}') from None
    config = SequenceParallelConfig.from_dict({"layout": LAYOUT} | attention_block, other_keys)
    if config.layout != LAYOUT:
        raise ValueError(
            f'"layout": "{config.layout}" contradicts "{KEY}", which cuts a dimension into '
            f'contiguous chunks; leave "layout" out'
        )
    return config, stages


def spread(
    model: nn.Module,
    sp: SequenceParallel,
    dsp: DynamicSequenceParallel,
    stages: Stages,
    verify: Mode = True,
) -> LayoutTracker:
    """Shard the hidden state of `model` over the ranks of `sp`; `remove()` undoes it.

    Calls `set_sequence_parallel(sp)` of the modules that have it, such as attention over all
    dimensions at once. The keys of the configuration beside "dsp" are for these modules.

    Args:
        dsp: over the ranks of sp, made with gradients="averaged".
        verify: whether the first forward is run on one rank too and compared (`FirstForward`).

    Raises:
        ValueError: if the stages do not fit the model, or keys choose a route for attention and no
            module attends over ranks.
    """
    attention_modules = receivers(model)
    if not attention_modules:
        _refuse_unused_keys(type(model).__name__, sp.config)
    tracker = LayoutTracker(model, dsp, stages)
    for module in attention_modules:
        getattr(module, RECEIVER)(sp)
    if verify and sp.size > 1:
        tracker.hooks.append(FirstForward(model, tracker, sp, verify).hook)
    return tracker


def _refuse_unused_keys(model: str, config: SequenceParallelConfig) -> None:
    """Refuse keys about attention for a model without modules that attend over ranks."""
    size = config.sequence_parallel_size
    defaults = SequenceParallelConfig(sequence_parallel_size=size, layout=LAYOUT).to_dict()
    values = config.to_dict()
    for key in sorted(values, key=lambda key: key != "strategy"):  # before the route that it sets
        if (value := values[key]) != defaults.get(key):
            raise ValueError(
                f'"{key}": {value!r} beside "{KEY}" says how attention meets over ranks, but no '
                f"module of {model} attends over ranks, by a method {RECEIVER}(sp); leave it out"
            )
