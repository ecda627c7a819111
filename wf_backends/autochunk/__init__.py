"""AutoChunk (arXiv 2401.10652): a model under a memory budget, found automatically."""

from wf_backends.autochunk.chunked import autochunk
from wf_backends.autochunk.handle import Handle
from wf_backends.autochunk.plan import ChunkedPart, ChunkPlan
from wf_backends.autochunk.tiles import Tiles, tile_modules
from wf_backends.autochunk.training import TrainingPlan, apply_training, plan_training

__all__ = [
    "ChunkPlan",
    "ChunkedPart",
    "Handle",
    "Tiles",
    "TrainingPlan",
    "apply_training",
    "autochunk",
    "plan_training",
    "tile_modules",
]
