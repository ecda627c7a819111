"""Small messages to one peer, sent as one: a message may cost more than copying what it carries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from wf_backends.comm.protocol import Message, Pending, Post

SMALL_BYTES = 1 << 17  # copying as many twice takes a core about as long as a message of gloo


def post_bundled(
    post: Post, label: str, sends: Sequence[Message], recvs: Sequence[Message]
) -> Pending:
    """Post messages, the small ones of each peer as one, ahead of its larger ones.

    Both sides decide by the sizes alone, so what one post sends to a peer must be what one post of
    that peer receives (see `Communicator.post`).

    Args:
        post: posts messages of CPU tensors, as `Communicator._post`.
    """
    if len(sends) < 2 and len(recvs) < 2:
        return post(label, sends, recvs)
    out, sends = _bundles(sends)
    into, recvs = _bundles(recvs)
    if not out and not into:
        return post(label, sends, recvs)
    packed = [(peer, torch.cat(small)) for peer, small in out.items()]
    landing = [(peer, _room(small)) for peer, small in into.items()]
    pending = post(label, [*packed, *sends], [*landing, *recvs])
    return _Bundled(pending, [(room, into[peer]) for peer, room in landing])


class _Bundled(Pending):
    """Bundles in flight, and what they carry as it lies in the tensors it belongs in."""

    def __init__(self, inner: Pending, arrivals: list[tuple[Tensor, list[Tensor]]]) -> None:
        self._inner, self._arrivals = inner, arrivals

    def wait(self) -> None:
        self._inner.wait()
        for room, targets in self._arrivals:
            pieces = room.split([target.numel() for target in targets])
            for target, piece in zip(targets, pieces, strict=True):
                target.copy_(piece)
        self._arrivals = []

    def poll(self) -> None:
        self._inner.poll()


def _bundles(messages: Sequence[Message]) -> tuple[dict[int, list[Tensor]], list[Message]]:
    """The small messages of each peer that has several, flat, and all others as they are."""
    small: defaultdict[int, list[Tensor]] = defaultdict(list)
    for peer, tensor in messages:
        if tensor.nbytes <= SMALL_BYTES:
            small[peer].append(tensor)
    several = {peer: _flat(tensors) for peer, tensors in small.items() if len(tensors) > 1}
    rest = [
        (peer, one) for peer, one in messages if peer not in several or one.nbytes > SMALL_BYTES
    ]
    return several, rest


def _flat(tensors: list[Tensor]) -> list[Tensor]:
    """The memory of contiguous tensors in one dtype: bytes, if theirs differ."""
    flat = [tensor.detach().view(-1) for tensor in tensors]
    if len({tensor.dtype for tensor in tensors}) == 1:
        return flat
    return [tensor.view(torch.uint8) for tensor in flat]


def _room(flat: list[Tensor]) -> Tensor:
    return flat[0].new_empty(sum(tensor.numel() for tensor in flat))
