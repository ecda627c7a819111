"""Attention of each query to keys that it chose, and to entries that stand for several tokens."""

from wf_backends.sparse.attention import SparseAttention
from wf_backends.sparse.compressed import CompressedAttention, Entries, Groups

__all__ = ["CompressedAttention", "Entries", "Groups", "SparseAttention"]
