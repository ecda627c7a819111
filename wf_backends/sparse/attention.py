"""Attention of each query to the keys that it chose, over one sequence that is on several ranks.

A layer with sparse attention chooses few keys for each query, by scores of an indexer of its own.
Any query may choose any earlier key, so that each rank gets the keys and values of all tokens, by
one all-gather, and computes its own rows. In the backward their gradients are summed over the ranks
and go to the owners, by one reduce-scatter. Multi-head latent attention sends its latents, and
attends to them, so that nothing is projected up for each chosen key:

    scale q . [W_k c, shared] = scale [W_k^T q_n, q_r] . [c, shared];  sum p W_v c = W_v sum p c

Shapes: b batch, s rows of this rank, S rows of the sequence, P ranks, h query heads, g key heads,
d head_dim of queries and keys, e of values, t chosen keys of a query.
Source: DeepSeek-V3.2 (arXiv 2512.02556, section 2.1); DeepSeek-V2 (arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wf_backends._compile import eager
from wf_backends.comm import ConsistencyCheck, Shared, fingerprint
from wf_backends.parallel import SequenceParallel, check_tensors, make_softmax
from wf_backends.schedule import Layout, Mask, layout_of, make_mask
from wf_backends.sparse.function import Columns, KeysAttention
from wf_backends.sparse.needed_rows import gather_needed
from wf_backends.sparse.readers import ChosenRows


class SparseAttention(Shared):
    """Exact attention of this rank's rows to chosen keys of the whole sequence of `sp`."""

    def __init__(self, sp: SequenceParallel) -> None:
        self._sp, self._consistency = sp, ConsistencyCheck(sp.comm)

    @eager
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chosen: Tensor,
        softmax_scale: float | None = None,
        sinks: Tensor | None = None,
        kv_up: Tensor | None = None,
        cu_seqlens: Sequence[int] | None = None,
        name: str | None = None,
    ) -> Tensor:
        """softmax(scale q k^T) v over the chosen keys; a query that chose none gets 0.

        Gradients of sinks and kv_up are this rank's part, as in `sp.attention`.

        Args:
            q: (b, s, h, d), any float dtype. k: (b, s, g, d), v: (b, s, g, e), g divides h.
            chosen: (b, s, g, t) for each key head, or (b, s, 1, t) for all, any integer dtype: the
                global positions of the keys that a row sees, none of them twice; -1 = no key.
            softmax_scale, sinks, kv_up, name: as in `sp.attention`.
            cu_seqlens: the borders of packed documents, if the layout needs them.

        Returns:
            (b, s, h, e), q's dtype.

        Raises:
            ValueError: for tensors that do not fit, on this rank or between ranks. In host memory
                also for a position beyond the sequence (on a GPU torch's indexing ends the job).
        """
        with self._consistency:  # an error in this block is raised on all ranks
            check_tensors(q, k, v, kv_up)
            softmax = make_softmax(q, softmax_scale, 0.0, None, sinks, kv_up=kv_up)
            mask = make_mask(cu_seqlens=cu_seqlens)
            _check_chosen(chosen, q, k)
        layout = self._checked_layout(q, k, v, chosen, mask, softmax.options, name)
        with torch.autocast(q.device.type, enabled=False):
            if kv_up is None:
                queries, rows, up_v = q, torch.cat((k, v), -1), None
                columns = Columns(slice(0, k.shape[3]), slice(k.shape[3], None))
            else:
                up_k, up_v = kv_up.tensor_split([q.shape[3] - k.shape[3]], 1)
                queries, rows = _in_latents(q, up_k), torch.cat((v, k), -1)
                columns = Columns(slice(None), slice(0, v.shape[3]))
            table = gather_needed(self._sp.comm, layout, None, rows, "chosen keys")
            scale = softmax.scores.scale
            make, sinks = (partial(ChosenRows, columns),), softmax.learned.sinks
            out = KeysAttention.apply(queries, sinks, scale, make, table, chosen)
            return out if up_v is None else torch.einsum("bshc,hec->bshe", out, up_v)

    def _checked_layout(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chosen: Tensor,
        mask: Mask,
        options: object,
        name: str | None,
    ) -> Layout:
        """Check that all ranks make the same call, and return which rows each of them has."""
        same = {
            "dtype": q.dtype,
            "batch": len(q),
            "shapes beside the rows": [tuple(x.shape[2:]) for x in (q, k, v)],
            "options": options,
            "cu_seqlens": mask.cu_seqlens,
            "needs a gradient": torch.is_grad_enabled() and (k.requires_grad or v.requires_grad),
        }
        numbers = {key: fingerprint(x) for key, x in same.items()}
        highest = int(chosen.max()) if chosen.is_cpu and chosen.numel() else -1
        lengths = {"rows": q.shape[1], "highest chosen key": highest}
        by_rank = self._consistency.check(numbers, lengths, q, layer=name, objects=same)
        seqlen, highest = sum(by_rank["rows"]), max(by_rank["highest chosen key"])
        if highest >= seqlen:  # raised on all ranks
            raise ValueError(f"chosen must be positions of {seqlen} tokens, or -1, got {highest}")
        return layout_of(self._sp.config.layout, by_rank["rows"], mask, "q")


def _in_latents(q: Tensor, up_k: Tensor) -> Tensor:
    """(b, s, h, c + r): [W_k^T q_n, q_r], whose products with [c, shared] are q k."""
    q_n, q_r = q.tensor_split([up_k.shape[1]], -1)
    return torch.cat((torch.einsum("bshn,hnc->bshc", q_n, up_k), q_r), -1)


def _check_chosen(chosen: Any, q: Tensor, k: Tensor) -> None:
    if q.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"q and k must be the same rows, got q {tuple(q.shape)}, k {tuple(k.shape)}"
        )
    shape = tuple(chosen.shape) if isinstance(chosen, Tensor) else type(chosen).__name__
    fits = isinstance(chosen, Tensor) and shape[:-1] in [(*q.shape[:2], g) for g in (1, k.shape[2])]
    if not fits or chosen.dtype.is_floating_point or chosen.dtype == torch.bool:
        raise ValueError(
            f"chosen must be integers (batch, rows, key heads or 1, keys) for q {tuple(q.shape)} "
            f"and k {tuple(k.shape)}, got {shape}"
            + (f" of {chosen.dtype}" if isinstance(chosen, Tensor) else "")
        )
    if chosen.device != q.device:
        raise ValueError(f"chosen must be on {q.device}, as q is, got {chosen.device}")
