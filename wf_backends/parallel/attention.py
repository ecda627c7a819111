"""One attention call: check, plan (once), trade heads for tokens, run the route.

Shapes: b batch, s local seqlen, S global seqlen, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from wf_backends._compile import refuse_transforms
from wf_backends.cluster import JobTopology
from wf_backends.comm import Communicator, ConsistencyCheck, Pass, fingerprint, gather_small
from wf_backends.kernels import Dropout, KernelSpec, Scores, select
from wf_backends.lowering import ACTIVATION, Problem, Shape, UlyssesGroups, lower
from wf_backends.parallel.choose import choose
from wf_backends.parallel.config import SequenceParallelConfig
from wf_backends.parallel.softmax import Softmax, Told, check_latents
from wf_backends.planner import Choice, Plan, Request, reason
from wf_backends.runtime import (
    Attention,
    Call,
    ChunkedAttention,
    HeadGroup,
    accumulator_dtype,
    heads_for_tokens,
    make_head_exchange,
    tokens_for_heads,
)
from wf_backends.schedule import LAYOUTS, Layout, Mask, check, layout_of


class DistributedAttention:
    """Attention over one sequence-parallel group, by one configuration.

    Args:
        topology: what the planner uses where the config leaves something to it.
    """

    def __init__(
        self, config: SequenceParallelConfig, comm: Communicator, topology: JobTopology
    ) -> None:
        self.config, self.comm, self.topology = config, comm, topology
        self._consistency = ConsistencyCheck(comm)
        self._calls = 0
        self._told = set[Choice]()
        self._narrow = config.partials == ACTIVATION
        self._same = lru_cache(maxsize=64)(self._make_same)
        self._call = lru_cache(maxsize=64)(self._make_call)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        softmax: Softmax,
        seqlen: int | None,
        layer: str | None = None,
    ) -> Tensor:
        """softmax(scores + mask) v for this rank's rows; see SequenceParallel.attention."""
        call, group = self.call(q, k, v, mask, softmax, seqlen, layer)
        if group.comm.size == 1:
            return Attention.apply(q, k, v, call, *softmax.learned)
        if len(group.queries) > 1:
            return ChunkedAttention.apply(q, k, v, call, group, *softmax.learned)
        heads = group.heads(0)
        qkv, now = group.qkv(0), call.now
        q, k, v = heads_for_tokens((q, k, v), qkv, group.comm, "ulysses qkv", now)
        learned = softmax.learned.of_heads(heads)
        out = Attention.apply(q, k, v, call.of_heads(heads), *learned)
        return tokens_for_heads((out,), group.out(0), group.comm, "ulysses out", now)[0]

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
        (b, s, h, d), (keys, g) = q.shape, k.shape[1:3]
        scores, (_, up, bias) = softmax.scores, softmax.learned
        tensors = (x is not None for x in (scores.slopes, scores.dropout, bias))
        options = scores.softcap > 0, *tensors
        width, latent = v.shape[3], 0
        if up is not None:
            width, latent = up.shape[1] - d + k.shape[3], k.shape[3] + width
        spec = KernelSpec(q.device.type, q.dtype, d, h, g, width, *options)
        same, words = self._same(spec, b, mask, softmax.told, seqlen)
        lengths = {"q rows": s, "key rows": keys}
        now = Pass(self._calls + 1, layer)
        self.comm.enter(now)
        told = self._consistency.check(same, lengths, q, layer=layer, words=words)
        self._calls = now.number  # not where a rank refused
        call, group = self._call(tuple(told.items()), mask, spec, b, latent)
        if scores.dropout is not None and scores.dropout.seed is None:
            scores = self._draw_seed(scores, scores.dropout, q.device)
        return replace(call, scores=scores, now=now), group

    def _draw_seed(self, scores: Scores, dropout: Dropout, device: torch.device) -> Scores:
        """The scores with a seed from torch's generator of the first rank, the same on all ranks.

        It stays on the device. Every rank draws, so that their generators stay alike where they
        are; a layer that is run again under activation checkpointing draws its seed again.
        """
        drawn = torch.randint(1 << 62, (1,), device=device)
        seed = gather_small(self.comm, drawn)[0]
        return replace(scores, dropout=replace(dropout, seed=seed))

    def _make_same(
        self, spec: KernelSpec, batch: int, mask: Mask, softmax: Told, seqlen: int | None
    ) -> tuple[dict[str, int], dict[str, object]]:
        """What must be the same on all ranks, by its name in errors; and what puts it in words."""
        known = self.topology.known
        numbers = {
            "batch size": batch,
            "heads": spec.heads,
            "kv heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "head_dim of v": spec.value_dim or spec.head_dim,
            "seqlen": -1 if seqlen is None else seqlen,
        }
        words: dict[str, object] = {
            "dtype": spec.dtype,
            "mask": mask,
            **dict(softmax),
            "config": self.config.to_dict()
            | {"its topology": {} if known is None else known.to_dict()},
        }
        return numbers | {name: fingerprint(value) for name, value in words.items()}, words

    def _make_call(
        self,
        told: tuple[tuple[str, tuple[int, ...]], ...],
        mask: Mask,
        spec: KernelSpec,
        batch: int,
        latent: int,
    ) -> tuple[Call, HeadGroup]:
        """The call with scores of its own to be put in.

        Args:
            told: the queries' and the keys' (name in errors, rows of every rank).
            latent: numbers of a token in place of its keys and values; 0 = keys and values.
        """
        lengths = [sum(rows) for _, rows in told]
        _check_positions(mask, spec, *lengths)
        _check_layout(self.config.layout, *lengths)
        q_layout, kv_layout = (
            layout_of(self.config.layout, rows, mask, name) for name, rows in told
        )
        choice = self._choose(lengths, mask, spec, batch, latent)
        groups = UlyssesGroups(self.comm.size, choice.degree, choice.stride)
        at, member = groups.find(self.comm.rank)
        members = groups.members(at)
        queries, keys = (
            make_head_exchange([layout[rank] for rank in members], heads, spec.heads).split(
                choice.chunks
            )
            for layout, heads in ((q_layout, spec.heads), (kv_layout, spec.kv_heads))
        )
        merged = map(groups.merge, (q_layout, kv_layout))
        there, back, keep = _problems(choice, groups, mask, *merged)
        seen = (queries if latent else keys)[0].share
        tile = replace(spec, heads=queries[0].share, kv_heads=seen, looks_back=mask.looks_back)
        kernel = select(self.config.kernel, tile).kernel
        forward, backward = lower(there, at), lower(back, at)
        route = self.comm.view(groups.route(member))
        group = HeadGroup(self.comm.view(members), queries, keys)
        return Call(forward, backward, route, kernel, Scores(1.0), keep, self._narrow), group

    def _choose(
        self, lengths: Sequence[int], mask: Mask, spec: KernelSpec, batch: int, latent: int
    ) -> Choice:
        """What the call runs, by the lengths of its queries and keys."""
        sizes = spec.dtype.itemsize, accumulator_dtype(spec.dtype).itemsize
        partial = sizes[0] if self._narrow else None
        shape = Shape(
            batch, spec.heads, spec.kv_heads, spec.head_dim, *sizes, spec.value_dim, partial, latent
        )
        topology = None
        if self.config.leaves_open and self.comm.size > 1:
            topology = self.topology.find(torch.device(spec.device))
        seqlen, keys = lengths
        return choose(self.config, shape, seqlen, mask, topology, keys, self._tell)

    def _tell(self, plan: Plan, request: Request) -> None:
        """Log every choice of the planner once, on the first rank of the job."""
        first = self.comm.rank == 0 and not (dist.is_initialized() and dist.get_rank())
        if first and self.comm.size > 1 and plan.choice not in self._told:
            self._told.add(plan.choice)
            logging.getLogger(__name__).warning("attention by %s", reason(plan, request))


def _problems(
    choice: Choice, groups: UlyssesGroups, mask: Mask, queries: Layout, keys: Layout
) -> tuple[Problem, Problem, tuple[bool, bool]]:
    """(forward, backward, what is kept in between: queries, keys) of a choice for these groups."""
    forward, backward = (check(one) for one in choice.schedules(groups.size))
    near = [groups.on_host(one.host_size) for one in (choice.forward, choice.backward)]
    sequence = queries, keys, mask
    there = Problem(forward, *sequence, choice.forward.keys_stay, choice.keep, near[0])
    back = Problem(backward, *sequence, choice.moves == "queries", host_size=near[1])
    if not choice.keep:
        return there, back, (False, False)
    return there, replace(back, schedule=forward, kept=True), forward.gathers()


def check_tensors(q: Tensor, k: Tensor, v: Tensor, kv_up: Tensor | None = None) -> None:
    """Refuse tensors that do not belong together; ValueError with their shapes, dtypes, devices."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) not in (Tensor, Parameter):  # others need not write into views, nor travel
            raise ValueError(
                f"{name} must be a plain torch.Tensor, got a {type(x).__name__}: pass the local "
                "tensor, such as x.to_local() or x.as_subclass(torch.Tensor)"
            )
        refuse_transforms(name, x)
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(
            f"q, k, v must be (batch, seqlen, heads, head_dim), got {_shapes(q, k, v)}"
        )
    if not (q.shape[2] and k.shape[2] and q.shape[3] and v.shape[3]):
        raise ValueError(f"heads, kv heads and head_dim must be positive, got {_shapes(q, k, v)}")
    if kv_up is not None:
        check_latents(q, k, v, kv_up)
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


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _check_positions(mask: Mask, spec: KernelSpec, seqlen: int, num_keys: int) -> None:
    mask.check_lengths(seqlen, num_keys)
    if seqlen == num_keys:
        return
    if spec.alibi or spec.position_bias or (mask.slices is None and mask != Mask()):
        raise NotImplementedError(
            f"cross attention ({seqlen} queries, {num_keys} keys) has no common positions: causal, "
            "window_size, cu_seqlens, alibi_slopes and position_bias need as many keys as "
            "queries; q_ranges and k_ranges say which queries see which keys"
        )


def _check_layout(layout: str, seqlen: int, num_keys: int) -> None:
    if seqlen != num_keys and LAYOUTS[layout].needs_slices:
        raise ValueError(
            f"the {layout} layout follows from the slices of one sequence, and there are {seqlen} "
            f"queries and {num_keys} keys: take another layout for cross attention"
        )
