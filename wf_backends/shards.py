"""Cutting a whole tensor into shards, and bringing shards together again."""

from __future__ import annotations

import torch
from torch import Tensor

from wf_backends.comm.protocol import Communicator
from wf_backends.layout import Layout
from wf_backends.mail import Mail, copy, pack, scatter
from wf_backends.ranges import size
from wf_backends.rankplan import Parcel


def take_shard(comm: Communicator, layout: Layout, dim: int, x: Tensor, label: str) -> Tensor:
    """This rank's rows of the whole x along `dim`; nothing is sent."""
    return pack(x.movedim(dim, 0), layout[comm.rank]).movedim(0, dim).contiguous()


def gather_shards(comm: Communicator, layout: Layout, dim: int, x: Tensor, label: str) -> Tensor:
    """The whole tensor along `dim`, in sequence order, from this rank's rows x and all others'."""
    rows = x.movedim(dim, 0).contiguous()
    mail = Mail(comm, label)
    for peer in range(comm.size):
        mail.send(Parcel(peer, ((0, len(rows)),)), (rows,))
    places = [Parcel(peer, shard) for peer, shard in enumerate(layout)]
    arriving = [mail.receive(place, (rows,)) for place in places]
    mail.deliver()
    whole = rows.new_empty((sum(map(size, layout)), *rows.shape[1:]))
    for place, values in zip(places, arriving, strict=True):
        scatter((whole,), place.rows, values, copy)
    return whole.movedim(0, dim).contiguous()


def positions(shard: tuple[tuple[int, int], ...], device: torch.device | None = None) -> Tensor:
    """(s,) int64: the global positions of a shard's rows."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in shard])
