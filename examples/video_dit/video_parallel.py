"""How the video transformer is sharded over ranks: the "parallel" block of a configuration.

`"switch": true`   DSP: before each stage, shard the dimension that the stage does not mix.
`"switch": false`  places are always sharded; spatial attention runs over the ranks.
`"wallfacer"`      how attention along a sharded dimension runs: any SequenceParallelConfig, such as
                   Ulysses, a ring, or WallFacer's concentric rings. "full" stages always use it.
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
    """A model whose hidden state is sharded over the ranks of a communicator.

    Args:
        config: the "parallel" block of a config file.

    Raises:
        ValueError: for an unknown key, or a config that does not fit the ranks.
    """

    def __init__(self, model: VideoDiT, config: Mapping[str, Any], comm: Communicator) -> None:
        for key in config:
            if key not in KEYS:
                raise ValueError(f"parallel: unknown key {key!r}, known are {list(KEYS)}")
        sp_config = {"layout": "contiguous", "sequence_parallel_size": comm.size}
        sp_config |= dict(config.get("wallfacer", {}))
        self.model, self.comm = model, comm
        self.sp = SequenceParallel(SequenceParallelConfig.from_dict(sp_config), comm)
        switch = bool(config.get("switch", True))
        dsp = DynamicSequenceParallel(comm, gradients="averaged")
        self.tracker = LayoutTracker(model, dsp, stages(model, switch))
        self._mean_over_ranks = GradientMean(comm)
        for block in model.blocks:
            if block.mixes == "full" or (block.mixes == "space" and not switch):
                block.attention.attend = self.sp.attention

    def average_gradients(self) -> None:
        """Average gradients over the ranks; they are then those of one device."""
        self._mean_over_ranks(self.model.parameters())


def stages(model: VideoDiT, switch: bool) -> Stages:
    """Which dimension each block needs whole, for the tracker.

    The first sharded dimension is places, unless the first block with a need mixes space.
    """
    mixes = [block.mixes for block in model.blocks]
    needs = {f"blocks.{i}": name for i, name in enumerate(mixes) if name != "full"}
    starts_along = "space"
    if switch and needs and list(needs.values())[0] == "space":
        starts_along = "time"
    return Stages(
        dims={"time": 1, "space": 2},
        enters="blocks.0",
        starts_along=starts_along,
        leaves="final",
        needs=needs if switch else {},
    )
