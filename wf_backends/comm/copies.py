"""Messages that travel as copies: of device tensors in host memory, of small ones as one.

A library may read host memory alone, and a message may cost more than copying what it carries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from wf_backends.comm.protocol import Message, Pending, Post

SMALL_BYTES = 1 << 17  # copying as many twice takes a core about as long as a message of gloo


class Copied(Pending):
    """Messages in flight, and what is copied from where they land to where it belongs.

    Args:
        copies: (from, to).
    """

    def __init__(self, inner: Pending, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._inner, self._copies = inner, copies

    def wait(self) -> None:
        self._inner.wait()
        for landed, target in self._copies:
            target.detach().copy_(landed)
        self._copies = ()

    def poll(self) -> None:
        self._inner.poll()


def post_on_host(
    post: Post, label: str, sends: Sequence[Message], recvs: Sequence[Message]
) -> Pending:
    """Post messages of device tensors as host copies. Posting and waiting synchronise.

    Args:
        post: posts messages of CPU tensors, as `Communicator._post`.
    """
    landing = [(peer, torch.empty_like(tensor, device="cpu")) for peer, tensor in recvs]
    pending = post(label, [(peer, tensor.cpu()) for peer, tensor in sends], landing)
    copies = [(host, tensor) for (_, host), (_, tensor) in zip(landing, recvs, strict=True)]
    return Copied(pending, copies)


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
    sizes = {peer: [part.numel() for part in small] for peer, small in into.items()}
    landing = [(peer, small[0].new_empty(sum(sizes[peer]))) for peer, small in into.items()]
    pending = post(label, [*packed, *sends], [*landing, *recvs])
    pairs = (zip(room.split(sizes[peer]), into[peer], strict=True) for peer, room in landing)
    return Copied(pending, [pair for peer in pairs for pair in peer])


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
