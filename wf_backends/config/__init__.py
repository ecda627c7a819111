"""What a user says: `SequenceParallelConfig`, and a command line's routes and masks.

Pure: standard library only.
"""

from wf_backends.config.config import LSS, SequenceParallelConfig
from wf_backends.config.mask_file import read_mask
from wf_backends.config.route_words import Route, check_host_size, meant, parse_route

__all__ = [
    "LSS",
    "Route",
    "SequenceParallelConfig",
    "check_host_size",
    "meant",
    "parse_route",
    "read_mask",
]
