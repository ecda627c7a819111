"""Multi-head latent attention: latents are sent, and every rank computes k and v from them.

A token has latents c, common to all heads, and a part of its keys that all heads share:

    k = [W_k c, shared];  v = W_v c;  W = [W_k | W_v] of each head

In the training of DeepSeek-V3 512 + 64 numbers of a token are sent in place of the 128 x (192 +
128) of its keys and values.

Shapes: b batch, i query rows, j key rows, h query heads, c latents, r head_dim of the shared part,
n + r head_dim of queries, e of values.
Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from wf_backends.kernels import Grads, OutLse, Scores, TileGrad, TileKernel
from wf_backends.schedule import Band


class LatentKernel:
    """A kernel that takes the shared part (b, j, 1, r) as k and the latents c (b, j, 1, c) as v.

    Args:
        kernel: computes the tile of the keys and values of all heads.
        up: (h, n + e, c), W of the tile's heads.
    """

    def __init__(self, kernel: TileKernel, up: Tensor) -> None:
        self._kernel, self._up = kernel, up
        self._wide = torch.promote_types(up.dtype, torch.float32)
        self._grad: Tensor | None = None

    def grad(self) -> Tensor:
        """(h, n + e, c), up's dtype: the gradient of `up`, summed over all tiles so far."""
        return torch.zeros_like(self._up) if self._grad is None else self._grad.to(self._up.dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, band: Band) -> OutLse:
        """See Kernel.forward; out (b, i, h, e)."""
        return self._kernel.forward(q, *self._keys_and_values(q, k, v), scores, band)

    def backward(self, tile: TileGrad, scores: Scores, band: Band) -> Grads:
        """See Kernel.backward: dq, and the gradients of the shared part and of c."""
        q, c, n = tile.q, tile.v, tile.q.shape[3] - tile.k.shape[3]
        k, v = self._keys_and_values(q, tile.k, c)
        dq, dk, dv = self._kernel.backward(tile._replace(k=k, v=v), scores, band)
        with torch.autocast(q.device.type, enabled=False):
            grads = torch.cat((dk[..., :n], dv), -1).to(c.dtype)  # b j h (n + e)
            dc = torch.einsum("bjhx,hxc->bjc", grads, self._up)
            dup = torch.einsum("bjhx,bjc->hxc", grads, c.squeeze(2))
        self._grad = dup.to(self._wide) if self._grad is None else self._grad.add_(dup)
        return dq, dk[..., n:].sum(2, keepdim=True), dc.unsqueeze(2)

    def _keys_and_values(self, q: Tensor, shared: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """k (b, j, h, n + r) and v (b, j, h, e)."""
        n, heads = q.shape[3] - shared.shape[3], q.shape[2]
        with torch.autocast(q.device.type, enabled=False):
            projected = torch.einsum("bjc,hxc->bjhx", c.squeeze(2), self._up).contiguous()
        keys = torch.cat((projected[..., :n], shared.expand(-1, -1, heads, -1)), -1)
        return keys, projected[..., n:]
