"""Attention of each query to the keys that it chose, as DeepSeek Sparse Attention has it."""

from wf_backends.sparse.attention import SparseAttention
from wf_backends.sparse.compressed import CompressedAttention, Entries, Groups

__all__ = ["CompressedAttention", "Entries", "Groups", "SparseAttention"]
