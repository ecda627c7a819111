"""What the first attention call of its kind finds for all later ones: plan, programs and kernel.

Shapes: b batch, s local seqlen, S global seqlen, h query heads, g key heads, d head_dim.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from wf_backends.cluster import JobTopology
from wf_backends.comm import Communicator, ConsistencyCheck, fingerprint
from wf_backends.config import LSS, SequenceParallelConfig
from wf_backends.kernels import KernelSpec, Scores, select
from wf_backends.lowering import ACTIVATION, Problem, Shape, UlyssesGroups, lower
from wf_backends.parallel.choose import named_choice, request_of
from wf_backends.parallel.softmax import ComparedOptions
from wf_backends.planner import Choice, Plan, Request, plan_for, reason
from wf_backends.runtime import AttentionCall, HeadGroup, accumulator_dtype, make_head_exchange
from wf_backends.schedule import LAYOUTS, Layout, Mask, check, layout_of


class PlannedCalls:
    """Plans the attention calls of one sequence-parallel group, and keeps the plans.

    Args:
        topology: hosts and links, for what the config leaves to the planner.
    """

    def __init__(
        self, config: SequenceParallelConfig, comm: Communicator, topology: JobTopology
    ) -> None:
        self.config, self.comm, self.topology = config, comm, topology
        self.consistency = ConsistencyCheck(comm)
        self._logged = set[Choice]()
        self._gather_first = config.strategy == LSS
        self._narrow_partials = config.partials == ACTIVATION or self._gather_first
        self._compared = lru_cache(maxsize=64)(self._make_compared)
        self._planned = lru_cache(maxsize=64)(self._make_call)

    def _make_compared(
        self, spec: KernelSpec, batch: int, mask: Mask, options: ComparedOptions, seqlen: int | None
    ) -> tuple[dict[str, int], dict[str, object]]:
        """What must be equal on all ranks, by name: integers to compare, and values for errors."""
        topology = self.topology.known
        numbers = {
            "batch size": batch,
            "heads": spec.heads,
            "kv heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "head_dim of v": spec.value_dim or spec.head_dim,
            "seqlen": -1 if seqlen is None else seqlen,
        }
        objects: dict[str, object] = {
            "dtype": spec.dtype,
            "mask": mask,
            **dict(options),
            "config": self.config.to_dict()
            | {"its topology": {} if topology is None else topology.to_dict()},
        }
        return numbers | {name: fingerprint(value) for name, value in objects.items()}, objects

    def _make_call(
        self,
        rows_by_rank: tuple[tuple[str, tuple[int, ...]], ...],
        mask: Mask,
        spec: KernelSpec,
        batch: int,
        latent_dim: int,
    ) -> AttentionCall:
        """The call without its scores, which `DistributedAttention.call` sets.

        Args:
            rows_by_rank: (name in errors, rows of every rank) of the queries, and of the keys.
            latent_dim: numbers of a token in place of its keys and values; 0 = keys and values.
        """
        lengths = [sum(rows) for _, rows in rows_by_rank]
        _check_lengths(self.config.layout, mask, spec, *lengths)
        mask = mask.within(lengths[0])  # as it is planned for
        q_layout, kv_layout = (
            layout_of(self.config.layout, rows, mask, name) for name, rows in rows_by_rank
        )
        choice = self._choose(lengths, mask, spec, batch, latent_dim)
        groups = UlyssesGroups(self.comm.size, choice.degree, choice.stride)
        group, member = groups.find(self.comm.rank)
        ranks = groups.members(group)
        queries, keys = (
            make_head_exchange([layout[rank] for rank in ranks], heads, spec.heads).split(
                choice.chunks
            )
            for layout, heads in ((q_layout, spec.heads), (kv_layout, spec.kv_heads))
        )
        group_layouts = [groups.merge(q_layout), groups.merge(kv_layout)]
        forward, backward, keep = _problems(choice, groups, mask, self._gather_first, group_layouts)
        if spec.alibi:
            forward, backward = (replace(x, joins_ranges=False) for x in (forward, backward))
        local_spec = replace(
            spec,
            heads=queries[0].heads_per_member,
            kv_heads=(queries if latent_dim else keys)[0].heads_per_member,
            looks_back=mask.looks_back,
        )
        kernel = select(self.config.kernel, local_spec)
        programs = lower(forward, group), lower(backward, group)
        route = self.comm.view(groups.route(member))
        head_group = HeadGroup(self.comm.view(ranks), queries, keys) if choice.degree > 1 else None
        options = keep, self._narrow_partials
        return AttentionCall(*programs, route, kernel, Scores(1.0), *options, group=head_group)

    def _choose(
        self, lengths: Sequence[int], mask: Mask, spec: KernelSpec, batch: int, latent_dim: int
    ) -> Choice:
        """What the call runs, for the global lengths (queries, keys)."""
        heads = spec.heads, spec.kv_heads, spec.head_dim
        itemsizes = spec.dtype.itemsize, accumulator_dtype(spec.dtype).itemsize
        partial = spec.dtype.itemsize if self._narrow_partials else None
        shape = Shape(batch, *heads, *itemsizes, spec.value_dim, partial, latent_dim)
        topology = None
        if self.config.leaves_open and self.comm.size > 1:
            topology = self.topology.find(torch.device(spec.device))
        seqlen, keys = lengths
        request = request_of(self.config, shape, seqlen, mask, topology, keys)
        if not self.config.leaves_open:
            return named_choice(request)
        plan = plan_for(request)
        self._log_plan(plan, request)
        return plan.choice

    def _log_plan(self, plan: Plan, request: Request) -> None:
        """Log every choice of the planner once, on the first rank of the job."""
        is_first = self.comm.global_ranks[self.comm.rank] == 0
        if is_first and self.comm.size > 1 and plan.choice not in self._logged:
            self._logged.add(plan.choice)
            logging.getLogger(__name__).warning("attention by %s", reason(plan, request))


def _problems(
    choice: Choice, groups: UlyssesGroups, mask: Mask, gather_first: bool, layouts: list[Layout]
) -> tuple[Problem, Problem, tuple[bool, bool]]:
    """(forward, backward, whether gathered (queries, keys) are kept in between) for a choice.

    Args:
        gather_first: whether all keys are gathered before the first tile, not between the tiles.
        layouts: of the queries and of the keys, by group.
    """
    forward_schedule, backward_schedule = (check(s) for s in choice.schedules(groups.size))
    forward = Problem(
        forward_schedule,
        layouts[0],
        layouts[1],
        mask,
        queries_walk=choice.forward.keys_stay and not gather_first,
        kept=choice.keep,
        host_size=groups.groups_per_host(choice.forward.host_size),
    )
    backward = replace(
        forward,
        schedule=forward_schedule if choice.keep else backward_schedule,
        queries_walk=choice.moves == "queries",
        host_size=groups.groups_per_host(choice.backward.host_size),
    )
    return forward, backward, forward_schedule.gathers() if choice.keep else (False, False)


def _check_lengths(layout: str, mask: Mask, spec: KernelSpec, seqlen: int, num_keys: int) -> None:
    """Refuse slices beyond the sequence, and cross attention with options that need positions."""
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
