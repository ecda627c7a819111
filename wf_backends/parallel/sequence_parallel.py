"""What a user holds: one sequence spread over the ranks of a group.

Shapes: b batch, s local seqlen, S global seqlen, h query heads, g key heads, d head_dim
of queries and keys, e of values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from wf_backends._compile import eager
from wf_backends.cluster import JobTopology, Topology, cache_folder
from wf_backends.comm import ConsistencyCheck, fingerprint, make_comm, sum_over_ranks
from wf_backends.parallel.attention import DistributedAttention, check_tensors
from wf_backends.parallel.config import LSS, SequenceParallelConfig
from wf_backends.parallel.data import prepare_batch
from wf_backends.parallel.loss import count_valid, token_loss
from wf_backends.parallel.lss import LssAttention
from wf_backends.parallel.sharding import Sharding
from wf_backends.parallel.softmax import make_softmax, plain_softmax
from wf_backends.schedule import SLICE_WORDS, make_mask, padding_multiple

STRATEGIES: Mapping[str | None, type[DistributedAttention]] = MappingProxyType(
    {None: DistributedAttention, LSS: LssAttention}
)
PLAIN = (make_mask(), make_mask(causal=True))  # the masks of most calls, causal or not


class SequenceParallel(Sharding):
    """Exact attention, batches and losses over one sequence-parallel group.

    Args:
        config: how the sequence is spread.
        group: None (the default group), a torch ProcessGroup, an mpi4py communicator, or one of
            our communicators. A group of several times `sequence_parallel_size` ranks is cut
            into blocks of consecutive ranks, one sequence each (data x sequence parallel).
        topology: hosts and links of the ranks, for what is "auto"; None = what the config's
            "topology" says.

    Raises:
        ValueError: if sequence_parallel_size does not divide the size of the group, or for a
            topology file that cannot be read.
    """

    def __init__(
        self, config: SequenceParallelConfig, group: Any = None, topology: Topology | None = None
    ) -> None:
        everyone, size = make_comm(group, config.timeout), config.sequence_parallel_size
        if everyone.size % size:
            start = f": start {size} ranks and call launch.init(), or give a group"
            raise ValueError(
                f"sequence_parallel_size must divide the {everyone.size} ranks of the group, "
                f"got {size}{start if everyone.size == 1 else ''}"
            )
        first = everyone.rank // size * size
        self.config = config
        self.comm = everyone.view(range(first, first + size))
        self.rank, self.size = self.comm.rank, size
        self.comm.watch()
        self._consistency = ConsistencyCheck(self.comm)
        found = JobTopology(self.comm, config.topology, topology, cache_folder(os.environ))
        self._attention = STRATEGIES[config.strategy](config, self.comm, found)

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

        Args:
            q: (b, s, h, d), any float dtype. k: (b, s', g, d), v: (b, s', g, e), g divides h; s'
                may differ from s (cross attention) where nothing is masked.
            causal: no query sees a later key.
            window_size: (left, right) tokens that a query sees beside its own, -1 = unlimited.
            cu_seqlens: borders 0 = c0 < c1 < ... = S of packed documents, host integers; the same
                cut for every sample of the batch.
            softmax_scale: default 1 / sqrt(d).
            dropout_p: probability with which a weight is dropped, in [0, 1).
            seqlen: S. None = the sum over the ranks; give it where shards are uneven and messages
                do not pass through host memory.
            name: of the layer. Where layers have names, a rank that leaves out a call is an error
                on all ranks; without names its next call is taken for the one that it left out,
                and only the backward ends in an error.
            q_ranges, k_ranges, attn_mask_types: in place of causal, window_size and cu_seqlens, the
                mask as slices that do not overlap: (start, stop) positions of their queries and of
                their keys, and "full", "causal" (the last query sees up to the last key),
                "inverse_causal" (the first query sees from the first key on) or "bicausal" (both).
            sinks: (h,), any float dtype, the same on every rank: a logit of each head, which takes
                part in the softmax and has no value. What a rank gets as their gradient is the part
                of the rows (and, under Ulysses, heads) that it computes: the sum over the ranks is
                the gradient, as it is for every other parameter, and engines that sum or average
                gradients over the ranks do it.
            softcap: 0 = none.
            alibi_slopes: (h,), the same on every rank, no gradient. i and j are global positions,
                as in flash-attn; they need as many keys as queries.
            dropout_seed: in [0, 2**63), the same on every rank. What is dropped follows from it and
                the global sample, head, query and key alone. None = drawn for each call, by the
                first rank from torch's generator.
            kv_up: (h, n + e, c), [W_k | W_v] of each head, for multi-head latent attention: k is
                (b, s', 1, r), a part of the keys that all heads share, and v (b, s', 1, c) the
                latents. Keys are [W_k v, k], with n + r = d, and values W_v v. r + c numbers of a
                token travel, and ranks project up what they read. What a rank gets as its gradient
                is the part that it computes, as of the sinks.
            position_bias: (h, 2 n - 1), any float dtype, the same on every rank: what is added to
                the scores by the distance j - i = 1 - n to n - 1 of key and query, by global
                positions; beyond, as at the ends. T5's buckets are such a table. Its gradient is
                the part that a rank computes, as of the sinks. It needs as many keys as queries.

        Returns:
            (b, s, h, e), q's dtype. 0 for a query that sees no key.

        Raises:
            ValueError: if shapes, dtypes, devices, heads or the mask do not fit, here or between
                ranks. NotImplementedError: for masked cross attention, torch.vmap, torch.func,
                forward-mode differentiation and torch.export.
        """
        with self._consistency:  # if it is refused here, it is on all ranks
            check_tensors(q, k, v, kv_up)
            options = softmax_scale, softcap, alibi_slopes, sinks, dropout_p, dropout_seed, kv_up
            usual = softmax_scale is alibi_slopes is sinks is kv_up is position_bias is None
            usual = usual and softcap == dropout_p == 0
            softmax = (
                plain_softmax(q.shape[-1]) if usual else make_softmax(q, *options, position_bias)
            )
            slices = q_ranges, k_ranges, attn_mask_types
            plain = cu_seqlens is q_ranges is k_ranges is attn_mask_types is None
            if plain and window_size == (-1, -1):
                mask = PLAIN[bool(causal)]
            else:
                mask = make_mask(causal, window_size, cu_seqlens, seqlen, *slices)
        return self._attention(q, k, v, mask, softmax, seqlen, name)

    @eager
    def shard_batch(
        self, batch: Mapping[str, Any], pad_token_id: int = 0, labels_are_shifted: bool = False
    ) -> dict[str, Any]:
        """This rank's part of a batch that every rank holds whole.

        Args:
            batch: "input_ids" (b, S), and optionally "labels", "attention_mask", "position_ids",
                "cu_seqlens", the mask's slices and other tensors (b, S, ...); see
                `wf_backends.parallel.data.prepare_batch`.

        Returns:
            The same keys, cut along dim 1: labels shifted before the cut, position_ids added,
            everything padded to equal shards, padding labelled -100. "cu_seqlens", "q_ranges",
            "k_ranges" and "attn_mask_types" stay whole.

        Raises:
            ValueError: for a malformed batch, or one that is not the same on every rank.
        """
        with self._consistency:  # if it is refused here, it is on all ranks
            whole = prepare_batch(
                batch,
                multiple=padding_multiple(self.config.layout, self.size),
                pad_token_id=pad_token_id,
                labels_are_shifted=labels_are_shifted,
            )
        tensors = self.check_same(whole)
        borders, slices = whole.get("cu_seqlens"), {k: whole[k] for k in SLICE_WORDS if k in whole}
        return whole | {key: self.shard(x, 1, borders, **slices) for key, x in tensors.items()}

    def check_same(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a batch, once it is known to be the same on every rank.

        Raises:
            ValueError: on every rank, naming what differs.
        """
        tensors = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
        same = {key: _checksum(value) for key, value in sorted(tensors.items())}
        same["cu_seqlens"] = fingerprint(batch.get("cu_seqlens"))
        same |= {key: fingerprint(batch[key]) for key in SLICE_WORDS if key in batch}
        like = next(iter(tensors.values()), torch.empty(0))
        keys = {"keys of the batch": fingerprint(sorted(same))}
        try:
            self._consistency.check(keys, {}, like, remember=False)
        except ValueError as error:
            error.add_note(f"keys of the batch on {self.comm.me}: {sorted(same)}")
            raise
        self._consistency.check(same, {}, like, remember=False)
        return tensors

    @eager
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """This rank's share of the mean cross entropy over all valid labels of the sequence.

        The sum over the ranks is the loss of one device, and the sum of the gradients its gradient,
        however the valid labels are spread.

        Args:
            logits: (b, s, vocab). labels: (b, s), already shifted (as shard_batch gives them).

        Returns:
            A scalar: sum over local tokens / global number of valid labels, float32 or wider.

        Raises:
            ValueError: if labels do not have the shape of logits without the vocabulary.
        """
        num_valid = self.sum_over_ranks(count_valid(labels))
        return token_loss(logits, labels, num_valid)

    @eager
    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of a small tensor over the sequence-parallel ranks, without a gradient."""
        return sum_over_ranks(self.comm, x.detach())

    def report(self) -> dict[str, int]:
        """Bytes that this rank sent since the last report, by hop and collective.

        Headers that check that the ranks agree, and counts of labels, are left out.
        """
        sent = {label: num_bytes for label, num_bytes in self.comm.sent.items() if num_bytes}
        self.comm.sent.clear()
        return sent


def _checksum(x: Tensor) -> int:
    return crc32(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
