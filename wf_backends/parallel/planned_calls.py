"""What is found once for each kind of attention call: the plan, the programs, the kernel.

Shapes: b batch, s local seqlen, S global seqlen, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist

from wf_backends.cluster import JobTopology
from wf_backends.comm import Communicator, ConsistencyCheck, fingerprint
from wf_backends.config import LSS, SequenceParallelConfig
from wf_backends.kernels import KernelSpec, Scores, select
from wf_backends.lowering import ACTIVATION, Problem, Shape, UlyssesGroups, lower
from wf_backends.parallel.choose import choose, request_of
from wf_backends.parallel.softmax import Told
from wf_backends.planner import Choice, Plan, Request, reason
from wf_backends.runtime import Call, HeadGroup, accumulator_dtype, make_head_exchange
from wf_backends.schedule import LAYOUTS, Layout, Mask, check, layout_of


class PlannedCalls:
    """The kinds of calls of one sequence-parallel group, by one configuration.

    Args:
        topology: what the planner uses where the config leaves something to it.
    """

    def __init__(
        self, config: SequenceParallelConfig, comm: Communicator, topology: JobTopology
    ) -> None:
        self.config, self.comm, self.topology = config, comm, topology
        self.consistency = ConsistencyCheck(comm)
        self._told = set[Choice]()
        self._at_once = config.strategy == LSS
        self._narrow = config.partials == ACTIVATION or self._at_once
        self._same = lru_cache(maxsize=64)(self._make_same)
        self._planned = lru_cache(maxsize=64)(self._make_call)

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
        _check_lengths(self.config.layout, mask, spec, *lengths)
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
        there, back, keep = _problems(choice, groups, mask, self._at_once, *merged)
        seen = (queries if latent else keys)[0].share
        tile = replace(
            spec,
            heads=queries[0].share,
            kv_heads=seen,
            looks_back=mask.looks_back,
            whole_sequence=groups.count == 1,
        )
        kernel = select(self.config.kernel, tile)
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
        request = request_of(self.config, shape, seqlen, mask, topology, keys)
        return choose(self.config, request, self._tell)

    def _tell(self, plan: Plan, request: Request) -> None:
        """Log every choice of the planner once, on the first rank of the job."""
        first = self.comm.rank == 0 and not (dist.is_initialized() and dist.get_rank())
        if first and self.comm.size > 1 and plan.choice not in self._told:
            self._told.add(plan.choice)
            logging.getLogger(__name__).warning("attention by %s", reason(plan, request))


def _problems(
    choice: Choice, groups: UlyssesGroups, mask: Mask, at_once: bool, queries: Layout, keys: Layout
) -> tuple[Problem, Problem, tuple[bool, bool]]:
    """(forward, backward, what is kept in between: queries, keys) of a choice for these groups.

    Args:
        at_once: whether keys are brought together by one exchange, and not behind the tiles.
    """
    forward, backward = (check(one) for one in choice.schedules(groups.size))
    near = [groups.groups_per_host(one.host_size) for one in (choice.forward, choice.backward)]
    sequence = queries, keys, mask
    stay = choice.forward.keys_stay and not at_once
    there = Problem(forward, *sequence, stay, choice.keep, near[0])
    back = Problem(backward, *sequence, choice.moves == "queries", host_size=near[1])
    if not choice.keep:
        return there, back, (False, False)
    return there, replace(back, schedule=forward, kept=True), forward.gathers()


def _check_lengths(layout: str, mask: Mask, spec: KernelSpec, seqlen: int, num_keys: int) -> None:
    """Refuse slices beyond the sequence, and cross attention with what needs common positions."""
    mask.check_lengths(seqlen, num_keys)
    if seqlen == num_keys:
        return
    if spec.alibi or spec.position_bias or (mask.slices is None and mask != Mask()):
        raise NotImplementedError(
            f"cross attention ({seqlen} queries, {num_keys} keys) has no common positions: causal, "
            "window_size, cu_seqlens, alibi_slopes and position_bias need as many keys as "
            "queries; q_ranges and k_ranges say which queries see which keys"
        )
    if LAYOUTS[layout].needs_slices:
        raise ValueError(
            f"the {layout} layout follows from the slices of one sequence, and there are {seqlen} "
            f"queries and {num_keys} keys: take another layout for cross attention"
        )
