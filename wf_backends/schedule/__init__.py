"""Who meets whom, who owns which token, what may be seen. Pure: standard library only."""

from wf_backends.schedule.band import CAUSAL, FULL, Band
from wf_backends.schedule.filling import excess, segments_of
from wf_backends.schedule.layout import (
    LAYOUTS,
    Layout,
    layout_of,
    make_layout,
    padding_multiple,
)
from wf_backends.schedule.mask import Mask, make_mask
from wf_backends.schedule.placement import (
    Placed,
    default_placement,
    digits,
    divisors,
    place,
    placements,
    read_placed,
    strides,
)
from wf_backends.schedule.ranges import (
    Range,
    Ranges,
    globalize,
    intersect,
    join,
    locate,
    locate_each,
    range_length,
    size,
    subtract,
    union,
)
from wf_backends.schedule.routes import ORDER, ROUTES, make_schedule
from wf_backends.schedule.schedule import Schedule, Shards, check, ranks_by_shard, render
from wf_backends.schedule.slices import SLICE_ARGUMENTS, Slice

__all__ = [
    "Band",
    "CAUSAL",
    "FULL",
    "LAYOUTS",
    "Layout",
    "Mask",
    "ORDER",
    "Placed",
    "ROUTES",
    "Range",
    "Ranges",
    "SLICE_ARGUMENTS",
    "Schedule",
    "Shards",
    "Slice",
    "ranks_by_shard",
    "check",
    "default_placement",
    "digits",
    "divisors",
    "excess",
    "globalize",
    "intersect",
    "join",
    "layout_of",
    "locate",
    "locate_each",
    "make_layout",
    "make_mask",
    "make_schedule",
    "padding_multiple",
    "place",
    "placements",
    "read_placed",
    "render",
    "size",
    "segments_of",
    "range_length",
    "strides",
    "subtract",
    "union",
]
