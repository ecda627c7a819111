"""Attention of one tile: `reference`, `sdpa` (torch's own kernels), `flash` (flash-attn)."""

from wf_backends.kernels.dropout import RANDOM_BITS, Dropout, mix
from wf_backends.kernels.merge import merge
from wf_backends.kernels.protocol import Kernel, KernelSpec, TileGrad
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.kernels.scores import PositionBias, Scores
from wf_backends.kernels.select import KERNELS, Selection, select

__all__ = [
    "Dropout",
    "KERNELS",
    "Kernel",
    "KernelSpec",
    "RANDOM_BITS",
    "ReferenceKernel",
    "PositionBias",
    "Scores",
    "Selection",
    "TileGrad",
    "merge",
    "mix",
    "select",
]
