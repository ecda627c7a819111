"""What a user writes: `SequenceParallelConfig`, and routes and masks of a command line.

Pure: standard library only.
"""

from wf_backends.config.config import LSS, SequenceParallelConfig, checked
from wf_backends.config.mask_file import read_mask
from wf_backends.config.route_config import Route, check_host_size, key_hint, parse_route

__all__ = [
    "LSS",
    "Route",
    "SequenceParallelConfig",
    "check_host_size",
    "checked",
    "key_hint",
    "parse_route",
    "read_mask",
]
