"""How the video transformer is spread over ranks: options of one configuration.

`"switch": true`   DSP: before a stage, the cut moves to the dimension that the stage does not mix.
`"switch": false`  the cut stays along places; spatial attention meets over the ranks.
`"wallfacer"`      how attention over the cut meets: any SequenceParallelConfig, such as Ulysses,
                   a ring, or WallFacer's concentric rings. "full" stages always need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from video_model import VideoDiT

from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm import Communicator
from wf_backends.dsp import DynamicSequenceParallel, LayoutTracker, Stages
from wf_backends.parallel import GradientMean

KEYS = ("switch", "wallfacer")


class ParallelVideo:
    """A model whose hidden state is spread over the ranks of a communicator.

    Raises:
        ValueError: for an unknown key, or a config that does not fit the ranks.
    """

    def __init__(self, model: VideoDiT, words: Mapping[str, Any], comm: Communicator) -> None:
        for key in words:
            if key not in KEYS:
                raise ValueError(f"parallel: unknown key {key!r}, known are {list(KEYS)}")
        meets = {"layout": "contiguous", "sequence_parallel_size": comm.size}
        meets |= dict(words.get("wallfacer", {}))
        self.model, self.comm = model, comm
        self.sp = SequenceParallel(SequenceParallelConfig.from_dict(meets), comm)
        switch = bool(words.get("switch", True))
        dsp = DynamicSequenceParallel(comm, gradients="averaged")
        self.tracker = LayoutTracker(model, dsp, stages(model, switch))
        self.mean = GradientMean(comm)
        for block in model.blocks:
            if block.mixes == "full" or (block.mixes == "space" and not switch):
                block.attention.attend = self.sp.attention

    def average_gradients(self) -> None:
        """Every rank gets the gradients of one device."""
        self.mean(self.model.parameters())


def stages(model: VideoDiT, switch: bool) -> Stages:
    """What the tracker has to know of the model; it cuts places where that saves a switch."""
    mixes = [block.mixes for block in model.blocks]
    needs = {f"blocks.{at}": name for at, name in enumerate(mixes) if name != "full"}
    first = next(iter(needs.values()), "time")
    return Stages(
        dims={"time": 1, "space": 2},
        enters="blocks.0",
        starts_along="time" if switch and first == "space" else "space",
        leaves="final",
        needs=needs if switch else {},
    )
