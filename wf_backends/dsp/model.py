"""Dynamic sequence parallelism from the words of a configuration: the key "dsp".

Every rank calls the model with the same whole batch and computes the same whole loss; the mean of
the parameter gradients over the ranks, as data parallelism takes it, is that of one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from wf_backends.dsp.first_forward import RECEIVER, FirstForward, Mode, receivers
from wf_backends.dsp.stages import LayoutTracker, Stages
from wf_backends.dsp.switch import DynamicSequenceParallel
from wf_backends.parallel import SequenceParallel, SequenceParallelConfig

KEY = "dsp"
LAYOUT = "contiguous"  # of a sharded dimension


def read_words(words: Mapping[str, Any]) -> tuple[SequenceParallelConfig, Stages | None]:
    """A configuration's words, and those of `Stages` if there is "dsp" among them.

    Raises:
        ValueError: for a word of either that is unknown or wrong, or a layout beside "dsp" that
            is not "contiguous".
    """
    own = {key: value for key, value in words.items() if key != KEY}
    if KEY not in words:
        return SequenceParallelConfig.from_dict(own), None
    try:
        stages = Stages.from_dict(words[KEY])
    except ValueError as error:
        raise ValueError(f'"{KEY}": {error}') from None
    config = SequenceParallelConfig.from_dict({"layout": LAYOUT} | own)
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

    Modules with a method `set_sequence_parallel`, such as attention over all dimensions at once,
    have it called with `sp`. The words of the configuration beside "dsp" are for them.

    Args:
        dsp: over the ranks of sp, made with gradients="averaged".
        verify: whether the first forward is run on one rank too and compared (`FirstForward`).

    Raises:
        ValueError: if the stages do not fit the model, or words say how attention meets where no
            module attends over ranks.
    """
    attending = receivers(model)
    if not attending:
        _refuse_idle_words(type(model).__name__, sp.config)
    tracker = LayoutTracker(model, dsp, stages)
    for module in attending:
        getattr(module, RECEIVER)(sp)
    if verify and sp.size > 1:
        tracker.also_remove(FirstForward(model, tracker, sp, verify).hook)
    return tracker


def _refuse_idle_words(model: str, config: SequenceParallelConfig) -> None:
    size = config.sequence_parallel_size
    idle = SequenceParallelConfig(sequence_parallel_size=size, layout=LAYOUT).to_dict()
    words = config.to_dict()
    for key in sorted(words, key=lambda key: key != "strategy"):  # before the route it names
        if (value := words[key]) != idle.get(key):
            raise ValueError(
                f'"{key}": {value!r} beside "{KEY}" says how attention meets over ranks, but no '
                f"module of {model} attends over ranks, by a method {RECEIVER}(sp); leave it out"
            )
