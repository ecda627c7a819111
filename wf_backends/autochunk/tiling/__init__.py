"""Training under a memory budget: modules, logits and loss are computed tile by tile.

In reading order: `training` plans; `tileable` proves on the graph what may be tiled; `fake_runs`
predicts memory, and refuses what computes with the number of rows; `tiles` applies `tiled_call` and
`tiled_loss`.
"""

from wf_backends.autochunk.tiling.tiled_call import TiledCall
from wf_backends.autochunk.tiling.tiles import Tiles, modules_in_tiles, tile_modules, tiled_modules
from wf_backends.autochunk.tiling.training import (
    TrainingPlan,
    apply_training,
    plan_training,
    tile_training,
)

__all__ = [
    "TiledCall",
    "Tiles",
    "TrainingPlan",
    "apply_training",
    "modules_in_tiles",
    "plan_training",
    "tile_modules",
    "tile_training",
    "tiled_modules",
]
