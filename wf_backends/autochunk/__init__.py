"""AutoChunk (arXiv 2401.10652): a model under a memory budget, found automatically."""

from wf_backends.autochunk.chunked import autochunk
from wf_backends.autochunk.find import BudgetError
from wf_backends.autochunk.handle import Handle
from wf_backends.autochunk.plan import ChunkedPart, ChunkPlan
from wf_backends.autochunk.profiles import Profiles, longest, memory_profiles
from wf_backends.autochunk.tiles import Tiles, tile_modules
from wf_backends.autochunk.training import TrainingPlan, apply_training, plan_training

__all__ = [
    "BudgetError",
    "ChunkPlan",
    "ChunkedPart",
    "Handle",
    "Profiles",
    "Tiles",
    "TrainingPlan",
    "apply_training",
    "autochunk",
    "longest",
    "memory_profiles",
    "plan_training",
    "tile_modules",
]
