"""One attention call: check and compare the arguments, exchange heads for tokens, run the route.

What only the first call of its kind does is in parallel/planned_calls.py.

Shapes: b batch, s local seqlen, S global seqlen, h query heads, g key heads, d head_dim of queries
and keys, e of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from wf_backends._compile import eager, refuse_transforms
from wf_backends._validation import MAX_TOKENS, positive
from wf_backends.comm import ConsistencyCheck, Pass, gather_small
from wf_backends.kernels import Dropout, KernelSpec, Scores
from wf_backends.parallel.planned_calls import PlannedCalls
from wf_backends.parallel.softmax import Softmax, make_softmax, plain_softmax
from wf_backends.runtime import AttentionCall, RouteAttention
from wf_backends.schedule import Mask, make_mask

INSTEAD_OF_TRANSFORMS = (
    "give samples as the batch dimension of q, k, v, and take gradients by .backward() or "
    "torch.autograd.grad"
)
PLAIN_MASKS = {False: make_mask(), True: make_mask(causal=True)}  # by `causal`


class AttentionMethod:
    """`SequenceParallel.attention`, the method that a user calls."""

    _consistency: ConsistencyCheck
    _attention: DistributedAttention

    @eager
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        cu_seqlens: Sequence[int] | None = None,
        softmax_scale: float | None = None,
        dropout_p: float = 0.0,
        seqlen: int | None = None,
        name: str | None = None,
        q_ranges: Sequence[tuple[int, int]] | None = None,
        k_ranges: Sequence[tuple[int, int]] | None = None,
        attn_mask_types: Sequence[str] | None = None,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        dropout_seed: int | None = None,
        kv_up: Tensor | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """softmax(scale q k^T + mask) v over the whole sequence, for this rank's rows.

        With the options, in the order in which they act on the scores x = scale q k^T:

            x = softcap tanh(x / softcap);  x = x - alibi_slopes |i - j| + position_bias(j - i)
            p = exp(x) / (sum exp(x) + exp(sinks));  out = p v

        i and j are global positions of queries and keys; alibi_slopes and position_bias need as
        many keys as queries. Options are the same on every rank. Gradients of sinks, kv_up and
        position_bias are this rank's part: the sum over the ranks is the gradient, as it is for
        every other parameter.

        Args:
            q: (b, s, h, d), any float dtype. k: (b, s', g, d), v: (b, s', g, e), g divides h; s'
                may differ from s (cross attention) where nothing is masked.
            causal: no query sees a later key.
            window_size: (left, right) tokens that a query sees besides its own, -1 = unlimited.
            cu_seqlens: borders 0 = c0 < c1 < ... = S of packed documents, host integers; the same
                for every sample of the batch.
            softmax_scale: positive, default 1 / sqrt(d). softcap: 0 = none.
            dropout_p: in [0, 1), the probability with which a weight is dropped.
            dropout_seed: in [0, 2**63); which weights are dropped follows from it and the global
                sample, head, query and key alone. None = the first rank draws one for each call
                from torch's generator.
            seqlen: S. None = the sum over the ranks; give it where shards are uneven and messages
                do not pass through host memory.
            name: the layer's name. If all calls have names and a rank leaves out a call, all ranks
                raise an error. Without names the rank's next call is matched with the one that it
                left out, and the error comes in the backward.
            q_ranges, k_ranges, attn_mask_types: in place of causal, window_size and cu_seqlens, the
                mask as slices that do not overlap: (start, stop) positions of their queries and of
                their keys, and "full", "causal" (the last query sees up to the last key),
                "inverse_causal" (the first query sees from the first key on) or "bicausal" (both).
            sinks: (h,), any float dtype: logits that take part in the softmax and have no value.
            alibi_slopes: (h,), without a gradient, as in flash-attn.
            position_bias: (h, 2 n - 1), finite, any float dtype, for distances j - i from 1 - n to
                n - 1; larger distances use the value of the nearest end, as in T5's buckets.
            kv_up: (h, n + e, c), [W_k | W_v] of each head, for multi-head latent attention: k is
                (b, s', 1, r), the part of the keys that all heads share, and v (b, s', 1, c) the
                latents. Keys are [W_k v, k], with n + r = d, and values W_v v. Messages carry
                r + c numbers for each token; a rank projects up the latents that it reads.

        Returns:
            (b, s, h, e), q's dtype. 0 for a query that sees no key.

        Raises:
            ValueError: if shapes, dtypes, devices, heads or the mask do not fit, on this rank or
                between ranks. NotImplementedError: for masked cross attention, torch.vmap,
                torch.func, forward-mode differentiation and torch.export. RuntimeError: while
                another thread is in a call of this object, and after the group was destroyed.
        """
        with self._consistency:  # an error in this block is raised on all ranks
            check_tensors(q, k, v, kv_up)
            no_tensors = alibi_slopes is sinks is kv_up is position_bias is None  # all are None
            no_seed_or_scale = softmax_scale is dropout_seed is None
            if no_tensors and no_seed_or_scale and softcap == dropout_p == 0:
                softmax = plain_softmax(q.shape[-1])
            else:
                options = softmax_scale, softcap, alibi_slopes, sinks, dropout_p, dropout_seed
                softmax = make_softmax(q, *options, kv_up, position_bias)
            _check_seqlen_and_name(seqlen, name)
            slices = q_ranges, k_ranges, attn_mask_types
            no_parts = cu_seqlens is q_ranges is k_ranges is attn_mask_types is None
            if no_parts and window_size == (-1, -1) and isinstance(causal, bool):
                mask = PLAIN_MASKS[causal]
            else:
                mask = make_mask(causal, window_size, cu_seqlens, seqlen, *slices)
        with self._consistency.one_thread:
            call = self._attention.call(q, k, v, mask, softmax, seqlen, name)
            return RouteAttention.apply(q, k, v, call, *softmax.learned)


class DistributedAttention(PlannedCalls):
    """Attention calls of one sequence-parallel group; arguments as those of `PlannedCalls`."""

    _num_calls = 0
    """Calls so far, the same number on all ranks."""

    def call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        softmax: Softmax,
        seqlen: int | None,
        layer: str | None = None,
    ) -> AttentionCall:
        """Check that all ranks make the same call, and return what it runs.

        The scores are for all heads; under Ulysses the kernel is for this rank's heads.
        """
        spec, latent_dim = _spec(q, k, v, softmax)
        has_backward = _has_backward(q, k, v, *softmax.learned)
        options = *softmax.options, ("needs a gradient", has_backward)
        same, objects = self._compared(spec, q.shape[0], mask, options, seqlen)
        lengths = {"q rows": q.shape[1], "key rows": k.shape[1]}
        now = Pass(self._num_calls + 1, layer)
        self.comm.enter(now)
        rows = self.consistency.check(same, lengths, q, layer=layer, objects=objects)
        self._num_calls = now.number  # unchanged if a rank refused the call
        if seqlen is not None and sum(rows["q rows"]) != seqlen:  # raised on all ranks
            raise ValueError(
                f"seqlen must be the rows of q of all ranks, {list(rows['q rows'])}, together; "
                f"got {seqlen}"
            )
        call = self._planned(tuple(rows.items()), mask, spec, q.shape[0], latent_dim)
        scores = softmax.scores
        if scores.dropout is not None and scores.dropout.seed is None:
            scores = self._draw_seed(scores, scores.dropout, q.device)
        return call._replace(scores=scores, forward_pass=now)

    def _draw_seed(self, scores: Scores, dropout: Dropout, device: torch.device) -> Scores:
        """The scores with a dropout seed that the first rank draws from torch's generator.

        The seed stays on the device. Every rank draws, so that generators with equal states stay
        equal; a layer that runs again under activation checkpointing draws the same seed again.
        """
        local_seed = torch.randint(1 << 62, (1,), device=device)
        seed = gather_small(self.comm, local_seed)[0]
        return replace(scores, dropout=replace(dropout, seed=seed))


def _spec(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[KernelSpec, int]:
    """The KernelSpec of all heads, and latent_dim: the numbers r + c that messages carry for each
    token in latent attention, 0 where they carry keys and values."""
    scores, (_, kv_up, bias) = softmax.scores, softmax.learned
    heads, head_dim = q.shape[2:]
    kv_heads, value_dim, latent_dim = k.shape[2], v.shape[3], 0
    if kv_up is not None:
        latent_dim = k.shape[3] + v.shape[3]
        value_dim = kv_up.shape[1] - (head_dim - k.shape[3])
    dims = head_dim, heads, kv_heads, value_dim
    options = scores.slopes is not None, scores.dropout is not None, bias is not None
    return KernelSpec(q.device.type, q.dtype, *dims, scores.softcap > 0, *options), latent_dim


def _has_backward(*inputs: Tensor | None) -> bool:
    """Whether autograd will call the backward, which waits for messages of the other ranks."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _check_seqlen_and_name(seqlen: object, name: object) -> None:
    """Raise a ValueError for a seqlen that is no length or a name that is no string."""
    if seqlen is not None:
        positive("seqlen", seqlen, maximum=MAX_TOKENS)
    if name is not None and not isinstance(name, str):
        raise ValueError(f"name must be the name of a layer or None, got {name!r}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, kv_up: Tensor | None = None) -> None:
    """Raise a ValueError for tensors whose shapes, dtypes or devices do not belong together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) not in (Tensor, Parameter):  # subclasses may lack in-place views and messages
            raise ValueError(
                f"{name} must be a plain torch.Tensor, got a {type(x).__name__}: pass the local "
                "tensor, such as x.to_local() or x.as_subclass(torch.Tensor)"
            )
    refuse_transforms("sp.attention", INSTEAD_OF_TRANSFORMS, q=q, k=k, v=v)
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k, v must be (batch, seqlen, heads, head_dim), got {_shapes(q, k, v)}"
        )
    if not (q.shape[2] and k.shape[2] and q.shape[3] and v.shape[3]):
        raise ValueError(f"heads, kv heads and head_dim must be positive, got {_shapes(q, k, v)}")
    if kv_up is not None:
        _check_latents(q, k, v, kv_up)
    elif k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "k and v must have one batch size, length and number of heads, and q the batch size "
            f"and head_dim of k, got {_shapes(q, k, v)}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"kv heads must divide heads, got {k.shape[2]} and {q.shape[2]} ({_shapes(q, k, v)})"
        )
    if not q.dtype == k.dtype == v.dtype:
        got = f"{q.dtype}, {k.dtype}, {v.dtype}"
        raise ValueError(f"q, k, v must have one dtype, got {got}; torch.autocast casts none here")
    if not q.dtype.is_floating_point:
        raise ValueError(f"q, k, v must have a floating point dtype, got {q.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}")


def _check_latents(q: Tensor, k: Tensor, v: Tensor, kv_up: Any) -> None:
    """Raise a ValueError for latents k, v that do not fit q, or a kv_up that does not fit them."""
    shapes = _shapes(q, k, v)
    if not isinstance(kv_up, Tensor) or kv_up.dim() != 3:
        got = tuple(kv_up.shape) if isinstance(kv_up, Tensor) else repr(kv_up)
        raise ValueError(f"kv_up must be a tensor (heads, n + e, c), got {got}")
    if k.shape[:3] != v.shape[:3] or k.shape[2] != 1 or q.shape[0] != k.shape[0]:
        raise ValueError(f"beside kv_up k and v must be (batch, length, 1, ...), got {shapes}")
    heads, up, latents = kv_up.shape
    if heads != q.shape[2] or latents != v.shape[3] or not 0 < q.shape[3] - k.shape[3] < up:
        raise ValueError(
            "kv_up must be (h, n + e, c) for q (..., h, n + r), k (..., 1, r), v (..., 1, c) and "
            f"values of e, got {tuple(kv_up.shape)} for {shapes}"
        )
    if kv_up.dtype != q.dtype or kv_up.device != q.device:
        raise ValueError(
            f"kv_up must have q's dtype and device, {q.dtype} on {q.device}, got {kv_up.dtype} on "
            f"{kv_up.device}"
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
