"""What a user says: `SequenceParallelConfig`, and a command line's routes and masks.

Pure: standard library only.
"""

from wf_backends.config.config import LSS, SequenceParallelConfig
from wf_backends.config.mask_file import read_mask
from wf_backends.config.route_words import Route, meant, parse_route

__all__ = ["LSS", "Route", "SequenceParallelConfig", "meant", "parse_route", "read_mask"]
