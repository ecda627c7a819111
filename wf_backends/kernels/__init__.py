"""Attention of one tile: `reference`, `sdpa` (torch's own kernels), `flash` (flash-attn)."""

from wf_backends.kernels.dropout import Dropout, position_dropout
from wf_backends.kernels.merge import merge
from wf_backends.kernels.protocol import Grads, Kernel, KernelSpec, OutLse, TileGrad, TileKernel
from wf_backends.kernels.reference import ReferenceKernel
from wf_backends.kernels.scores import PositionBias, Scores
from wf_backends.kernels.select import KERNELS, select

__all__ = [
    "Dropout",
    "Grads",
    "KERNELS",
    "Kernel",
    "KernelSpec",
    "OutLse",
    "ReferenceKernel",
    "PositionBias",
    "Scores",
    "TileGrad",
    "TileKernel",
    "merge",
    "position_dropout",
    "select",
]
