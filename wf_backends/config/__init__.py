"""What a user says: `SequenceParallelConfig`. Pure: standard library only."""

from wf_backends.config.config import LSS, SequenceParallelConfig
from wf_backends.config.route_words import Route, meant

__all__ = ["LSS", "Route", "SequenceParallelConfig", "meant"]
