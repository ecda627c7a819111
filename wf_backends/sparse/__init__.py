"""Attention of each query to the keys that it chose, as DeepSeek Sparse Attention has it."""

from wf_backends.sparse.attention import SparseAttention

__all__ = ["SparseAttention"]
