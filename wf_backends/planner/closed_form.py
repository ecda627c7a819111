"""What a pass costs, in closed form: for thousands of ranks, without building a schedule.

All figures are those of the busiest rank and link, as if ranks kept
step. On hosts that hold whole digits (see planner/route_shape.py) this counts a full mask's bytes
exactly. For other masks it counts those of a full one: on the busiest link of a step most rows are
needed by someone. Only a sliding window on a contiguous or a zigzag layout ends the walk early.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import ceil, inf

from wf_backends.lowering import bundles, unevenness
from wf_backends.planner.exact_cost import buffer_bytes
from wf_backends.planner.link_loads import NOTHING, Load
from wf_backends.planner.route_shape import RouteShape, Side
from wf_backends.planner.ulysses_cost import pipelined
from wf_backends.planner.workload import Cost, HeadSplit, PassKind
from wf_backends.schedule import FULL

CALLS_OF_A_BUNDLE = 6
"""Kernel calls on rows that cross once: what a rank fetched lies between what others pass on."""


class ClosedForm:
    """Closed forms for one pass of a head split, whatever the route."""

    def __init__(self, split: HeadSplit, kind: PassKind) -> None:
        self.split, self.kind, self.topology = split, kind, split.topology
        self.rows, self.mask = kind.row_bytes(split.shape), split.workload.mask
        size, seqlen = split.route_size, split.workload.seqlen
        self.call_s = self._calls_s()
        self.shards = kind.ordered(seqlen / size, split.workload.num_keys / size)
        uneven = unevenness(self.mask, seqlen, split.workload.layout)  # of many ranks
        uneven -= (uneven - 1) / size  # one rank of the route has everything
        in_vain = self.mask.band.edges * split.rate.diagonal_keys * seqlen
        scores = split.workload.scores * uneven + in_vain
        self.busiest_s = scores / size * kind.seconds_per_score(split)

    def cost(self, shape: RouteShape) -> Cost:
        """What the pass costs on routes of a shape (see `shape_of`), all chunks of heads."""
        walked = shape.turned() if self.kind.queries_walk else shape
        return pipelined(self.split, self._one_chunk(walked))

    def _one_chunk(self, shape: RouteShape) -> Cost:
        """What one chunk costs.

            T = G + first + sum over the hops between of max(hold + c, h) + last + H

        where G gathers walkers and H brings their results home, c is one step's tiles, h a hop of
        walkers and of partial results, and hold the computing time that messages take. In the first
        step rows that stay arrive, in the last their results leave: see `_edge_s`.
        """
        at = self.topology
        live, call_s = self._live_hops(shape), self.call_s
        step_s = self.busiest_s / (live + 1)
        gather, fetch, leave, home = around = self._exchanges(shape)
        took = gather.seconds(at) + home.seconds(at)
        transfer_s = took + fetch.seconds(at) + leave.seconds(at)
        computed = (live + 1) * (step_s + call_s)
        nic, inside = sum(load.nic for load in around), sum(load.inside for load in around)
        steps = list(self._hops(shape, live))
        for index, (times, hop) in enumerate(steps):
            hop_s = hop.seconds(at)
            nic, inside = nic + times * hop.nic, inside + times * hop.inside
            transfer_s += times * hop_s
            arrives = fetch if index == 0 else NOTHING
            leaves = leave if index == len(steps) - 1 else NOTHING
            if arrives is leaves or not shape.stay.foreign:
                took += times * max(hop.hold_s(at) + step_s + call_s, hop_s)
            else:
                edge = self._edge_s(shape.stay, step_s, call_s, arrives, hop, leaves)
                took, computed = took + edge[0], computed + edge[1]
        memory, gathered = self._buffers(shape)
        return Cost(took, computed, transfer_s, nic, inside, memory, gathered)

    def _edge_s(
        self, stay: Side, step_s: float, call_s: float, arrives: Load, hop: Load, leaves: Load
    ) -> tuple[float, float]:
        """(seconds of the first or the last step, seconds that it computes more than other steps).

            max(max(hold + c, F + p) + l, F + max(h, p) + L, r + L)

        where rows that stay arrive in F seconds and their results leave in L, the last of them in
        l. p are the tiles that wait for the last rows, r those that the first results wait for
        which take the longer link.
        """
        at, owners = self.topology, bundles(stay.foreign)
        parts, last_share, passing_s = self._edge_rounds(stay)
        part_s, calls_s = last_share * step_s + call_s, (parts - 1) * call_s
        near = stay.axis.near - 1 if stay.axis is not None and leaves.nic else 0
        rounds, done = next(pair for pair in enumerate(accumulate(owners), 1) if pair[1] > near)
        first_s = done / stay.shards * step_s + rounds * call_s
        before = stay.exchange(at, self.shards[0] * self.rows.stay_partial, fewer=owners[-1])
        last = NOTHING
        if leaves is not NOTHING:
            last = Load(leaves.nic - before.nic, leaves.inside - before.inside)
        come_s, gone_s = arrives.seconds(at) + passing_s, leaves.seconds(at)
        hold_s = arrives.hold_s(at) + hop.hold_s(at) + leaves.hold_s(at)
        computed_s = hold_s + step_s + call_s + calls_s
        took = max(
            max(computed_s, come_s + part_s) + last.seconds(at),
            come_s + max(hop.seconds(at), part_s) + gone_s,
            first_s + gone_s,
        )
        return took, calls_s

    def _edge_rounds(self, stay: Side) -> tuple[int, float, float]:
        """(kernel calls, the share of a step's tiles that wait for the last rows, seconds in which
        these are passed on) of a first step.

        Where rows cross once, a rank computes on what it fetched of the last bundle and on what
        others passed on of the one before, and then on what they pass on of the last.
        """
        owners = bundles(stay.foreign)
        if not stay.once or stay.axis is None:
            return len(owners) + min(1, stay.own), owners[-1] / stay.shards, 0.0
        here = stay.axis.near
        hosts = bundles(max(1, ceil(stay.axis.size / here) - 1))
        last = [count * here / stay.shards for count in hosts[-2:]]
        passed = hosts[-1] * (here - 1) * self.shards[0] * self.rows.stay_gathered
        calls = CALLS_OF_A_BUNDLE * (len(hosts) + 1)
        return calls, sum(last), self.topology.inside.seconds(passed)

    def _buffers(self, shape: RouteShape) -> tuple[float, float]:
        """(bytes of all buffers at their peak, of those that a forward gathered)."""
        stay, walk = shape.stay.shards * self.shards[0], shape.walk.shards * self.shards[1]
        gathered = stay * self.rows.stay if shape.stay.foreign else 0.0
        gathered += walk * self.rows.walk if shape.walk.foreign else 0.0
        return buffer_bytes(self.shards, (stay, walk), self.rows), gathered

    def _exchanges(self, shape: RouteShape) -> tuple[Load, Load, Load, Load]:
        """(walkers gathered, rows that stay fetched, their results leaving, walkers' results)."""
        at, rows, (stay, walk) = self.topology, self.rows, self.shards
        partial = walk * rows.walk_partial
        if not shape.num_hops:
            home = shape.walk.exchange(at, partial)
        elif shape.walk.shards == 1:
            home = shape.hops[-1][1].hop(partial)
        else:
            home = Side(shape.walk.shards, own=0).exchange(at, partial)
        gather = shape.walk.exchange(at, walk * rows.walk_gathered)
        if not shape.stay.foreign:
            return gather, NOTHING, NOTHING, home
        fetch, leave = (
            shape.stay.exchange(at, stay * row) for row in (rows.stay_gathered, rows.stay_partial)
        )
        return gather, fetch, leave, home

    def _hops(self, shape: RouteShape, live: int) -> Iterator[tuple[int, Load]]:
        """(how many, of how many bytes): a hop behind each step but the last, which has partials.

        Partial results of walkers leave one step after they were computed; of the first step only
        those of other ranks' rows.
        """
        walk = shape.walk
        partial = self.shards[1] * self.rows.walk_partial
        moved = (0.0, walk.foreign * partial, walk.shards * partial)
        done, hop = 0, self.shards[1] * walk.shards * self.rows.walk
        for times, axis in shape.hops:
            for start, stop, results in zip((0, 1, 2), (1, 2, live), moved, strict=True):
                count = min(done + times, stop, live) - max(done, start)
                if count > 0:
                    yield count, axis.hop(hop + results)
            done += times
        last = moved[min(live, 2)]
        yield 1, shape.hops[0][1].hop(last) if last and shape.hops else NOTHING

    def _calls_s(self) -> float:
        """Of a step's kernel calls, beside their FLOPs.

        Under a band two, the last of which sees all keys or none where it is causal; but groups of
        ranks that are apart have two for every member.
        """
        if self.mask.band == FULL:
            return self.split.rate.call_s
        pieces = 2 * (self.split.degree if self.split.stride > 1 else 1)
        return (pieces - (self.mask.band.left == inf)) * self.split.rate.call_s

    def _live_hops(self, shape: RouteShape) -> int:
        """How many hops carry anything: in a causal window all readers of a key are near.

        ceil(window / r), where readers are r tokens further away with each hop.
        """
        band, layout = self.mask.band, self.split.workload.layout
        if band.left == inf or band.right > 0 or len(shape.hops) != 1:
            return shape.num_hops
        reach = {"contiguous": shape.stay.shards * self.shards[0]}
        if not shape.gathers:
            reach["zigzag"] = self.shards[0] / 2
        if layout not in reach:
            return shape.num_hops
        return min(shape.num_hops, ceil(band.left / reach[layout]))
