"""What one rank does for a schedule, step by step. Pure: standard library only."""

from wf_backends.lowering.areas import (
    BACKWARD_FLOPS,
    computed_area,
    mask_area,
    slice_area,
    tile_area,
    unevenness,
)
from wf_backends.lowering.derivation import lower
from wf_backends.lowering.gather_rounds import bundle_sizes
from wf_backends.lowering.message_bytes import (
    ACTIVATION,
    FLOAT32,
    PARTIALS,
    RowBytes,
    Shape,
    backward_row_bytes,
    forward_row_bytes,
)
from wf_backends.lowering.problem import Problem
from wf_backends.lowering.program import (
    Exchange,
    Gather,
    Parcel,
    Parcels,
    RankProgram,
    Round,
    Stay,
    Step,
    parcels,
)
from wf_backends.lowering.tiles import Tile, make_tiles
from wf_backends.lowering.ulysses_groups import UlyssesGroups

__all__ = [
    "ACTIVATION",
    "FLOAT32",
    "PARTIALS",
    "BACKWARD_FLOPS",
    "Exchange",
    "Gather",
    "Parcel",
    "Parcels",
    "UlyssesGroups",
    "Problem",
    "RankProgram",
    "Round",
    "RowBytes",
    "Shape",
    "Stay",
    "Step",
    "Tile",
    "backward_row_bytes",
    "bundle_sizes",
    "computed_area",
    "forward_row_bytes",
    "mask_area",
    "parcels",
    "slice_area",
    "lower",
    "make_tiles",
    "tile_area",
    "unevenness",
]
