"""Small messages to one peer, sent as one: a message may cost more than copying what it carries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wf_backends.comm.protocol import Message, Pending

SMALL = 1 << 17  # bytes: copying as many twice takes a core about as long as a message of gloo
Post = Callable[[str, Sequence[Message], Sequence[Message]], Pending]


def post_bundled(
    post: Post, label: str, sends: Sequence[Message], recvs: Sequence[Message]
) -> Pending:
    """Post messages, the small ones of each peer as one, ahead of its larger ones.

    Both sides decide by the sizes alone, so what one post sends to a peer must be what one post of
    that peer receives (see `Communicator.post`).

    Args:
        post: posts messages of CPU tensors, as `Communicator._post`.
    """
    out, sends = _bundles(sends)
    into, recvs = _bundles(recvs)
    if not out and not into:
        return post(label, sends, recvs)
    packed = [(peer, torch.cat([_bytes(one) for one in small])) for peer, small in out.items()]
    landing = [
        (peer, torch.empty(sum(map(_size, small)), dtype=torch.uint8))
        for peer, small in into.items()
    ]
    pending = post(label, [*packed, *sends], [*landing, *recvs])
    arrivals = [(one, into[peer]) for peer, one in landing]
    return _Bundled(pending, arrivals)


class _Bundled(Pending):
    """Bundles in flight, and the tensors that what they carry belongs in."""

    def __init__(self, inner: Pending, arrivals: list[tuple[Tensor, list[Tensor]]]) -> None:
        self._inner, self._arrivals = inner, arrivals

    def wait(self) -> None:
        self._inner.wait()
        for bundle, targets in self._arrivals:
            pieces = bundle.split([_size(target) for target in targets])
            for target, piece in zip(targets, pieces, strict=True):
                _bytes(target).copy_(piece)
        self._arrivals = []

    def poll(self) -> None:
        self._inner.poll()


def _bundles(messages: Sequence[Message]) -> tuple[dict[int, list[Tensor]], list[Message]]:
    """The small messages of each peer that has several, and all others as they are."""
    small: defaultdict[int, list[Tensor]] = defaultdict(list)
    for peer, tensor in messages:
        if _size(tensor) <= SMALL:
            small[peer].append(tensor)
    several = {peer: tensors for peer, tensors in small.items() if len(tensors) > 1}
    rest = [(peer, one) for peer, one in messages if peer not in several or _size(one) > SMALL]
    return several, rest


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory."""
    return tensor.detach().view(-1).view(torch.uint8)
