"""What a pass costs, in closed form: for thousands of ranks, without building a schedule.

All figures are those of the busiest rank and link, as if all ranks kept step. A full mask's bytes
are exact on hosts that hold whole digits (see cost/route_shape.py), on other hosts at most twice
the real ones. Those of concentric rings are exact on one host and with one rank a host; on other
hosts NICs count more, since all owners of a rank's first keys count as on other hosts.

Other masks are priced with the bytes of a full mask: on the busiest link of a step most rows are
needed by some rank. Only a sliding window on a contiguous or a zigzag layout ends the hops early.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf

from wf_backends.cost.exact_cost import buffer_bytes
from wf_backends.cost.route_shape import NOTHING, HeldShards, LinkBytes, RouteShape
from wf_backends.cost.ulysses import pipelined
from wf_backends.cost.workload import Cost, HeadSplit, PassKind
from wf_backends.lowering import bundle_sizes, unevenness
from wf_backends.schedule import FULL

CALLS_PER_BUNDLE = 6
"""Kernel calls on rows that cross once: a rank's own fetches lie between rows passed on to it."""


class ClosedForm:
    """Closed forms for one pass of a head split, on any route."""

    def __init__(self, split: HeadSplit, kind: PassKind) -> None:
        self.split, self.kind, self.topology = split, kind, split.topology
        self.row_bytes, self.mask = kind.row_bytes(split.shape), split.workload.mask
        size, seqlen = split.route_size, split.workload.seqlen
        self.call_s = self._calls_s()
        # rows of one shard: (of the side that stays, of the walkers)
        self.shard_rows = kind.ordered(seqlen / size, split.workload.num_keys / size)
        uneven = unevenness(self.mask, seqlen, split.workload.layout)  # for many ranks
        uneven -= (uneven - 1) / size  # for one rank it is 1
        masked_scores = self.mask.band.edges * split.rate.diagonal_keys * seqlen
        scores = split.workload.scores * uneven + masked_scores
        self.tiles_s = scores / size * kind.seconds_per_score(split)  # of the busiest rank

    def cost(self, shape: RouteShape) -> Cost:
        """What the pass costs on routes of a shape, all chunks of heads. One chunk takes

            T = G + first + sum over the hops between of max(hold + c, h) + last + H

        where G gathers walkers and H returns their results to the owners, c is the tiles of one
        step, h a hop of walkers and partial results, and hold the computing time that messages
        take. In the first step rows of the side that stays arrive, in the last step their results
        leave: see `_edge_s`.
        """
        topology, rows = self.topology, self.row_bytes
        stay, walk = self.kind.ordered(shape.queries, shape.keys)
        stay = replace(stay, cross_once=shape.cross_once)
        live_hops = self._live_hops(shape)
        step_s = self.tiles_s / (live_hops + 1)
        gather, to_owners = self._walker_bytes(shape, walk)
        fetched, results = (self.shard_rows[0] * n for n in (rows.stay.gathered, rows.stay.partial))
        hops = list(self._hops(shape, walk, live_hops))
        seconds = gather.seconds(topology) + to_owners.seconds(topology)
        compute_s = (live_hops + 1) * (step_s + self.call_s)
        for index, (count, hop) in enumerate(hops):
            is_first, is_last = index == 0, index == len(hops) - 1
            if stay.foreign and (is_first or is_last):
                arriving, leaving = fetched if is_first else 0.0, results if is_last else 0.0
                edge_s, extra_s = self._edge_s(stay, step_s, hop, arriving, leaving)
                seconds, compute_s = seconds + edge_s, compute_s + extra_s
            else:
                step_and_hold_s = hop.hold_s(topology) + step_s + self.call_s
                seconds += count * max(step_and_hold_s, hop.seconds(topology))
        held_rows = stay.shards * self.shard_rows[0], walk.shards * self.shard_rows[1]
        gathered_bytes = held_rows[0] * rows.stay.row if stay.foreign else 0.0
        gathered_bytes += held_rows[1] * rows.walk.row if walk.foreign else 0.0
        exchanges = (stay.exchange(topology, n) for n in (fetched, results))
        all_sent = [*hops, *((1, sent) for sent in (gather, to_owners, *exchanges))]
        chunk_cost = Cost(
            seconds,
            compute_s,
            transfer_s=sum(count * sent.seconds(topology) for count, sent in all_sent),
            nic_bytes=sum(count * sent.nic for count, sent in all_sent),
            inside_bytes=sum(count * sent.inside for count, sent in all_sent),
            memory_bytes=buffer_bytes(self.shard_rows, held_rows, rows, arrive=live_hops > 0),
            gathered_bytes=gathered_bytes,
        )
        return pipelined(self.split, chunk_cost)

    def _edge_s(
        self, stay: HeldShards, step_s: float, hop: LinkBytes, arriving: float, leaving: float
    ) -> tuple[float, float]:
        """(seconds of the first or the last step, seconds that it computes more than other steps).

            T = max(max(hold + c, F + p) + l, F + max(h, p) + L, r + L)

        Rows of the side that stays arrive in F seconds, from one bundle of owners after another,
        and their results leave in L, those to the last bundle in l. The hop takes h. All tiles take
        c, those that wait for the last rows p, those on rows of earlier bundles r.

        Args:
            arriving, leaving: bytes of one owner.
        """
        topology, call_s = self.topology, self.call_s
        *earlier, last = bundle_sizes(stay.foreign)  # how many owners, by bundle
        calls, waiting, passed_on = len(earlier) + 1 + stay.own, last, 0
        if stay.cross_once and stay.axis is not None:  # bundles are of hosts; their rows passed on
            per_host = stay.axis.per_host
            hosts = bundle_sizes(max(1, stay.axis.size // per_host - 1))
            calls = CALLS_PER_BUNDLE * (len(hosts) + 1)
            waiting, passed_on = sum(hosts[-2:]) * per_host, hosts[-1] * (per_host - 1)
        waiting_s = waiting / stay.shards * step_s + call_s
        earlier_s = sum(earlier) / stay.shards * step_s + len(earlier) * call_s

        fetch, results = (stay.exchange(topology, num_bytes) for num_bytes in (arriving, leaving))
        to_earlier = stay.exchange(topology, leaving, skip_last=last)
        to_last = LinkBytes(results.nic - to_earlier.nic, results.inside - to_earlier.inside)
        pass_on_s = topology.inside.seconds(passed_on * max(arriving, leaving))
        hold_s = sum(sent.hold_s(topology) for sent in (fetch, hop, results))
        fetch_s, results_s = fetch.seconds(topology) + pass_on_s, results.seconds(topology)
        seconds = max(
            max(hold_s + step_s + calls * call_s, fetch_s + waiting_s) + to_last.seconds(topology),
            fetch_s + max(hop.seconds(topology), waiting_s) + results_s,
            earlier_s + results_s,
        )
        return seconds, (calls - 1) * call_s

    def _walker_bytes(self, shape: RouteShape, walk: HeldShards) -> tuple[LinkBytes, LinkBytes]:
        """(walkers gathered before the first step, the last step's results sent to the owners)."""
        topology, row, shard_rows = self.topology, self.row_bytes.walk, self.shard_rows[1]
        partial = shard_rows * row.partial
        if not shape.num_hops:
            to_owners = walk.exchange(topology, partial)
        elif walk.shards == 1:
            to_owners = shape.hops[-1][1].hop(partial)
        else:
            to_owners = HeldShards(walk.shards, own=0).exchange(topology, partial)
        return walk.exchange(topology, shard_rows * row.gathered), to_owners

    def _hops(
        self, shape: RouteShape, walk: HeldShards, live_hops: int
    ) -> Iterator[tuple[int, LinkBytes]]:
        """(number of equal hops, bytes of one): one hop after each step.

        Partial results of walkers leave one step after they were computed, of the first step only
        those of other ranks' shards. After the last step nothing else travels.
        """
        partial = self.shard_rows[1] * self.row_bytes.walk.partial
        partial_bytes = (0.0, walk.foreign * partial, walk.shards * partial)
        walker_bytes = self.shard_rows[1] * walk.shards * self.row_bytes.walk.row
        first_hop = 0  # index of the axis's first hop
        for num_hops, axis in shape.hops:
            stops = 1, 2, live_hops
            for start, (stop, results) in enumerate(zip(stops, partial_bytes, strict=True)):
                count = min(first_hop + num_hops, stop, live_hops) - max(first_hop, start)
                if count > 0:
                    yield count, axis.hop(walker_bytes + results)
            first_hop += num_hops
        last = partial_bytes[min(live_hops, 2)]
        yield 1, shape.hops[0][1].hop(last) if last else NOTHING

    def _calls_s(self) -> float:
        """Seconds of a step's kernel calls, without their FLOPs.

        A band takes two calls; two for every member of a Ulysses group whose ranks are not
        neighbours. Without a window it is one fewer: the last keys are then seen by all or none.
        """
        if self.mask.band == FULL:
            return self.split.rate.call_s
        calls = 2 * (self.split.degree if self.split.stride > 1 else 1)
        if self.mask.band.left == inf:
            calls -= 1
        return calls * self.split.rate.call_s

    def _live_hops(self, shape: RouteShape) -> int:
        """How many hops carry anything: in a causal window all readers of a key are near.

        ceil(window / r), where readers are r tokens further away with each hop.
        """
        band, layout = self.mask.band, self.split.workload.layout
        if band.left == inf or band.right > 0 or len(shape.hops) != 1:
            return shape.num_hops
        stay, walk = self.kind.ordered(shape.queries, shape.keys)
        tokens_per_hop = {"contiguous": stay.shards * self.shard_rows[0]}
        if not stay.foreign and not walk.foreign:
            tokens_per_hop["zigzag"] = self.shard_rows[0] / 2
        if layout not in tokens_per_hop:
            return shape.num_hops
        return min(shape.num_hops, ceil(band.left / tokens_per_hop[layout]))
