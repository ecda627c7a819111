"""What a pass costs, in closed form: for thousands of ranks, without building a schedule.

All figures are those of the busiest rank and link, as if ranks kept step. On hosts that hold whole
digits (see cost/route_shape.py) this counts a full mask's bytes exactly, on others at most twice
as many. For other masks it counts those of a full one: on the busiest link of a step most rows are
needed by someone. Only a sliding window on a contiguous or a zigzag layout ends the walk early.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf

from wf_backends.cost.exact_cost import buffer_bytes
from wf_backends.cost.route_shape import NOTHING, Load, RouteShape, Side
from wf_backends.cost.ulysses import pipelined
from wf_backends.cost.workload import Cost, HeadSplit, PassKind
from wf_backends.lowering import bundle_sizes, unevenness
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
        """What the pass costs on routes of a shape, all chunks of heads. One chunk takes

            T = G + first + sum over the hops between of max(hold + c, h) + last + H

        where G gathers walkers and H brings their results home, c is one step's tiles, h a hop of
        walkers and of partial results, and hold the computing time that messages take. In the first
        step rows that stay arrive, in the last their results leave: see `_edge_s`.
        """
        at, (stay, walk) = self.topology, self.kind.ordered(shape.queries, shape.keys)
        live = self._live_hops(shape)
        step_s = self.busiest_s / (live + 1)
        gather, home = self._walkers(shape, walk)
        come, leave = (
            self.shards[0] * row for row in (self.rows.stay.gathered, self.rows.stay.partial)
        )
        hops = list(self._hops(shape, walk, live))
        took = gather.seconds(at) + home.seconds(at)
        computed = (live + 1) * (step_s + self.call_s)
        for index, (times, hop) in enumerate(hops):
            first, last = index == 0, index == len(hops) - 1
            if stay.foreign and (first or last):
                edge = self._edge_s(stay, shape.once, step_s, hop, first * come, last * leave)
                took, computed = took + edge[0], computed + edge[1]
            else:
                took += times * max(hop.hold_s(at) + step_s + self.call_s, hop.seconds(at))
        held = stay.shards * self.shards[0], walk.shards * self.shards[1]
        gathered = held[0] * self.rows.stay.row if stay.foreign else 0.0
        gathered += held[1] * self.rows.walk.row if walk.foreign else 0.0
        around = gather, home, *(stay.exchange(at, one, once=shape.once) for one in (come, leave))
        sent = [*hops, *((1, load) for load in around)]
        one_chunk = Cost(
            took,
            computed,
            transfer_s=sum(times * load.seconds(at) for times, load in sent),
            nic_bytes=sum(times * load.nic for times, load in sent),
            inside_bytes=sum(times * load.inside for times, load in sent),
            memory_bytes=buffer_bytes(self.shards, held, self.rows, live > 0),
            gathered_bytes=gathered,
        )
        return pipelined(self.split, one_chunk)

    def _edge_s(
        self, stay: Side, once: bool, step_s: float, hop: Load, come: float, leave: float
    ) -> tuple[float, float]:
        """(seconds of the first or the last step, seconds that it computes more than other steps).

            max(max(hold + c, F + p) + l, F + max(h, p) + L, r + L)

        where rows that stay arrive in F seconds and their results leave in L, the last of them in
        l; p are the tiles that wait for the last rows, r those before the last owners'.

        Args:
            come, leave: bytes of one owner.
        """
        at, call_s, owners = self.topology, self.call_s, bundle_sizes(stay.foreign)
        calls, waiting, passed_s = len(owners) + stay.own, owners[-1], 0.0
        if once and stay.axis is not None:  # on the last bundle of hosts and what is passed on
            here = stay.axis.near
            hosts = bundle_sizes(max(1, stay.axis.size // here - 1))
            calls, waiting = CALLS_OF_A_BUNDLE * (len(hosts) + 1), sum(hosts[-2:]) * here
            passed_s = at.inside.seconds(hosts[-1] * (here - 1) * max(come, leave))
        arrives, leaves = (stay.exchange(at, each, once=once) for each in (come, leave))
        before = stay.exchange(at, leave, owners[-1], once)
        last = Load(leaves.nic - before.nic, leaves.inside - before.inside)
        hold_s = sum(load.hold_s(at) for load in (arrives, hop, leaves))
        part_s = waiting / stay.shards * step_s + call_s
        others_s = (stay.foreign - owners[-1]) / stay.shards * step_s + (len(owners) - 1) * call_s
        come_s, gone_s = arrives.seconds(at) + passed_s, leaves.seconds(at)
        took = max(
            max(hold_s + step_s + calls * call_s, come_s + part_s) + last.seconds(at),
            come_s + max(hop.seconds(at), part_s) + gone_s,
            others_s + gone_s,
        )
        return took, (calls - 1) * call_s

    def _walkers(self, shape: RouteShape, walk: Side) -> tuple[Load, Load]:
        """Walkers gathered before the first step; the last step's results brought home."""
        at, rows, shard = self.topology, self.rows, self.shards[1]
        partial = shard * rows.walk.partial
        if not shape.num_hops:
            home = walk.exchange(at, partial)
        elif walk.shards == 1:
            home = shape.hops[-1][1].hop(partial)
        else:
            home = Side(walk.shards, own=0).exchange(at, partial)
        return walk.exchange(at, shard * rows.walk.gathered), home

    def _hops(self, shape: RouteShape, walk: Side, live: int) -> Iterator[tuple[int, Load]]:
        """(how many, of how many bytes): a hop behind each step but the last, which has partials.

        Partial results of walkers leave one step after they were computed; of the first step only
        those of other ranks' rows.
        """
        partial = self.shards[1] * self.rows.walk.partial
        moved = (0.0, walk.foreign * partial, walk.shards * partial)
        done, hop = 0, self.shards[1] * walk.shards * self.rows.walk.row
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
        stay, walk = self.kind.ordered(shape.queries, shape.keys)
        reach = {"contiguous": stay.shards * self.shards[0]}
        if not stay.foreign and not walk.foreign:
            reach["zigzag"] = self.shards[0] / 2
        if layout not in reach:
            return shape.num_hops
        return min(shape.num_hops, ceil(band.left / reach[layout]))
