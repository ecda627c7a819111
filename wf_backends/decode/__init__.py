"""Attention of new tokens over keys and values that lie on all ranks: generation."""

from wf_backends.decode.cache import SLACK, KeyValueCache

__all__ = ["SLACK", "KeyValueCache"]
