"""torch's own flash kernels, through the aten operators that return lse."""

from __future__ import annotations

import torch
from torch import Tensor

from wf_backends.kernels.protocol import KernelSpec
from wf_backends.mask import FULL, Band

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class SdpaKernel:
    """The Kernel protocol on torch's scaled_dot_product_attention operators."""

    name = "sdpa"

    def refuses(self, spec: KernelSpec) -> str | None:
        """Anything but full and causal tiles on a CPU, for now."""
        if spec.device != "cpu":
            return f"only runs on cpu, got {spec.device}"
        if spec.windowed:
            return "takes full and causal tiles, not windows"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band
    ) -> tuple[Tensor, Tensor]:
        """See Kernel.forward."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = _FORWARD(q, k, v, 0.0, band != FULL, scale=scale)
        return out.transpose(1, 2), lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        delta: Tensor,
        scale: float,
        band: Band,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Kernel.backward."""
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        grads = _BACKWARD(dout, q, k, v, out, lse, 0.0, band != FULL, scale=scale)
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv
