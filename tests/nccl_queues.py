"""NCCL's queues: would the batches that ranks post there wait for each other in a circle?

NCCL has one queue on each rank for all messages of a group. A batch, the messages of one post,
starts when the batch before it has ended, and ends when every peer has started the batch with the
other end of each message. Messages from one rank to another are matched in order. The messages of
gloo, MPI and threads wait for nothing but their own peer: what is right there may hang over NCCL.
Messages without another end are left alone: `comm/threads.py` reports them.

Source: NCCL's documentation, "Group calls" and "Point-to-point communication"; a process group of
torch puts all batches of `batch_isend_irecv` on one stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from wf_backends.comm import Communicator
from wf_backends.comm.protocol import Message, Pending

Link = tuple[int, int]  # (sender, receiver)


class Batch(NamedTuple):
    """The messages of one post."""

    label: str
    sends: list[Link]
    receives: list[Link]


def record_batches(comm: Communicator, batches: list[Batch]) -> None:
    """From now on append what `comm` posts to `batches`; NCCL gets no empty messages."""
    post, me = comm._post, comm.rank

    def recorded_post(label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        sent = [(me, peer) for peer, tensor in sends if tensor.numel()]
        received = [(peer, me) for peer, tensor in recvs if tensor.numel()]
        if sent or received:
            batches.append(Batch(label, sent, received))
        return post(label, sends, recvs)

    comm._post = recorded_post


def assert_queues_end(queues: Sequence[Sequence[Batch]]) -> None:
    """Raise if the batches, by rank in the order of posting, would not all end."""
    peers = _peers_of_batches(queues)
    started = [0] * len(queues)  # by rank: the batch at the head of the queue
    while ended := [
        rank
        for rank, head in enumerate(started)
        if head < len(queues[rank])
        and all(started[peer] >= batch for peer, batch in peers[rank][head])
    ]:
        for rank in ended:
            started[rank] += 1
    waits = {
        rank: f"{queue[started[rank]].label!r} for {sorted(peers[rank][started[rank]])}"
        for rank, queue in enumerate(queues)
        if started[rank] < len(queue)
    }
    assert not waits, f"over NCCL ranks would wait for (rank, number of its batch): {waits}"


def _peers_of_batches(queues: Sequence[Sequence[Batch]]) -> list[list[set[tuple[int, int]]]]:
    """By rank and batch: (peer, number of its batch) that have the other ends of the messages."""
    sent, received = defaultdict[Link, list[int]](list), defaultdict[Link, list[int]](list)
    for queue in queues:
        for number, batch in enumerate(queue):
            for link in batch.sends:
                sent[link].append(number)
            for link in batch.receives:
                received[link].append(number)
    peers = [[set[tuple[int, int]]() for _ in queue] for queue in queues]
    for link in sent.keys() | received.keys():
        sender, receiver = link
        for send, receive in zip(sent[link], received[link], strict=False):
            peers[sender][send].add((receiver, receive))
            peers[receiver][receive].add((sender, send))
    return peers
