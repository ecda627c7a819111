"""One attention call: check, agree, trade heads for tokens, run the route.

What only the first call of a kind does is in parallel/planned_calls.py.

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
from wf_backends._validation import positive
from wf_backends.comm import ConsistencyCheck, Pass, gather_small
from wf_backends.kernels import Dropout, KernelSpec, Scores
from wf_backends.parallel.planned_calls import PlannedCalls
from wf_backends.parallel.softmax import Softmax, make_softmax, plain_softmax
from wf_backends.runtime import (
    Attention,
    Call,
    HeadGroup,
    Learned,
    UlyssesAttention,
)
from wf_backends.schedule import Mask, make_mask

MAX_TOKENS = 1 << 62
INSTEAD_OF_TRANSFORMS = (
    "give samples as the batch dimension of q, k, v, and take gradients by .backward() or "
    "torch.autograd.grad"
)
PLAIN = (make_mask(), make_mask(causal=True))  # the masks of most calls, causal or not


class AttentionOfSequence:
    """The method that a user calls; a part of `SequenceParallel`."""

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
            window_size: (left, right) tokens that a query sees beside its own, -1 = unlimited.
            cu_seqlens: borders 0 = c0 < c1 < ... = S of packed documents, host integers; the same
                cut for every sample of the batch.
            softmax_scale: default 1 / sqrt(d). softcap: 0 = none.
            dropout_p: in [0, 1), the probability with which a weight is dropped.
            dropout_seed: in [0, 2**63); what is dropped follows from it and the global sample,
                head, query and key alone. None = drawn for each call, by the first rank from
                torch's generator.
            seqlen: S. None = the sum over the ranks; give it where shards are uneven and messages
                do not pass through host memory.
            name: of the layer. Where layers have names, a rank that leaves out a call is an error
                on all ranks; without names its next call is taken for the one that it left out,
                and only the backward ends in an error.
            q_ranges, k_ranges, attn_mask_types: in place of causal, window_size and cu_seqlens, the
                mask as slices that do not overlap: (start, stop) positions of their queries and of
                their keys, and "full", "causal" (the last query sees up to the last key),
                "inverse_causal" (the first query sees from the first key on) or "bicausal" (both).
            sinks: (h,), any float dtype: logits that take part in the softmax and have no value.
            alibi_slopes: (h,), without a gradient, as in flash-attn.
            position_bias: (h, 2 n - 1), any float dtype, of the distances j - i = 1 - n to n - 1;
                beyond, as at the ends. T5's buckets are such a table.
            kv_up: (h, n + e, c), [W_k | W_v] of each head, for multi-head latent attention: k is
                (b, s', 1, r), a part of the keys that all heads share, and v (b, s', 1, c) the
                latents. Keys are [W_k v, k], with n + r = d, and values W_v v. r + c numbers of a
                token travel, and ranks project up what they read.

        Returns:
            (b, s, h, e), q's dtype. 0 for a query that sees no key.

        Raises:
            ValueError: if shapes, dtypes, devices, heads or the mask do not fit, here or between
                ranks. NotImplementedError: for masked cross attention, torch.vmap, torch.func,
                forward-mode differentiation and torch.export. RuntimeError: while another thread
                is in a call of this object, and after the group was destroyed.
        """
        with self._consistency:  # if it is refused here, it is on all ranks
            check_tensors(q, k, v, kv_up)
            usual = softmax_scale is alibi_slopes is sinks is kv_up is position_bias is None
            if usual and dropout_seed is None and softcap == dropout_p == 0:
                softmax = plain_softmax(q.shape[-1])
            else:
                options = softmax_scale, softcap, alibi_slopes, sinks, dropout_p, dropout_seed
                softmax = make_softmax(q, *options, kv_up, position_bias)
            _check_words(seqlen, name)
            slices = q_ranges, k_ranges, attn_mask_types
            plain = cu_seqlens is q_ranges is k_ranges is attn_mask_types is None
            if plain and window_size == (-1, -1) and isinstance(causal, bool):
                mask = PLAIN[causal]
            else:
                mask = make_mask(causal, window_size, cu_seqlens, seqlen, *slices)
        with self._consistency.one_thread:
            planned = self._attention.call(q, k, v, mask, softmax, seqlen, name)
            return run(q, k, v, *planned, softmax.learned)


class DistributedAttention(PlannedCalls):
    """Attention calls of one sequence-parallel group; arguments as those of `PlannedCalls`."""

    _calls = 0
    """So far, counted alike on all ranks."""

    def call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        softmax: Softmax,
        seqlen: int | None,
        layer: str | None = None,
    ) -> tuple[Call, HeadGroup]:
        """The call, of all heads, and their exchange, once all ranks are known to ask for the same.

        Under Ulysses the kernel is that of a rank's heads.
        """
        (spec, latent), batch = _spec(q, k, v, softmax), q.shape[0]
        same, words = self._same(spec, batch, mask, softmax.told, seqlen)
        lengths = {"q rows": q.shape[1], "key rows": k.shape[1]}
        now = Pass(self._calls + 1, layer)
        self.comm.enter(now)
        told = self.consistency.check(same, lengths, q, layer=layer, words=words)
        self._calls = now.number  # not where a rank refused
        if seqlen is not None and sum(told["q rows"]) != seqlen:  # as it is on all ranks
            raise ValueError(
                f"seqlen must be the rows of q of all ranks, {list(told['q rows'])}, together; "
                f"got {seqlen}"
            )
        call, group = self._planned(tuple(told.items()), mask, spec, batch, latent)
        scores = softmax.scores
        if scores.dropout is not None and scores.dropout.seed is None:
            scores = self._draw_seed(scores, scores.dropout, q.device)
        return call._replace(scores=scores, now=now), group

    def _draw_seed(self, scores: Scores, dropout: Dropout, device: torch.device) -> Scores:
        """The scores with a seed from torch's generator of the first rank, the same on all ranks.

        It stays on the device. Every rank draws, so that their generators stay alike where they
        are; a layer that is run again under activation checkpointing draws its seed again.
        """
        drawn = torch.randint(1 << 62, (1,), device=device)
        seed = gather_small(self.comm, drawn)[0]
        return replace(scores, dropout=replace(dropout, seed=seed))


def _spec(q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[KernelSpec, int]:
    """What kernels are asked for, of all heads; and the numbers of a token that travel in place of
    its keys and values, 0 if these do."""
    scores, (_, up, bias) = softmax.scores, softmax.learned
    (heads, head_dim), kv_heads, width, latent = q.shape[2:], k.shape[2], v.shape[3], 0
    if up is not None:
        width, latent = up.shape[1] - head_dim + k.shape[3], k.shape[3] + width
    dims = head_dim, heads, kv_heads, width
    there = scores.slopes is not None, scores.dropout is not None, bias is not None
    return KernelSpec(q.device.type, q.dtype, *dims, scores.softcap > 0, *there), latent


def run(q: Tensor, k: Tensor, v: Tensor, call: Call, group: HeadGroup, learned: Learned) -> Tensor:
    """softmax(scores + mask) v for this rank's rows: the call's programs, inside its exchanges."""
    if group.comm.size == 1:
        return Attention.apply(q, k, v, call, *learned)
    return UlyssesAttention.apply(q, k, v, call, group, *learned)


def _check_words(seqlen: object, name: object) -> None:
    """Refuse what is no length and no name; ValueError."""
    if seqlen is not None:
        positive("seqlen", seqlen, maximum=MAX_TOKENS)
    if name is not None and not isinstance(name, str):
        raise ValueError(f"name must be the name of a layer or None, got {name!r}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, kv_up: Tensor | None = None) -> None:
    """Refuse tensors that do not belong together; ValueError with their shapes, dtypes, devices."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) not in (Tensor, Parameter):  # others need not write into views, nor travel
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
        raise ValueError(f"q, k, v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.dtype.is_floating_point:
        raise ValueError(f"q, k, v must have a floating point dtype, got {q.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}")


def _check_latents(q: Tensor, k: Tensor, v: Tensor, kv_up: Any) -> None:
    """Refuse latents that do not belong to q's heads, and a kv_up that does not fit them."""
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
