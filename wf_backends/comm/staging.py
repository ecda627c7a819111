"""Device tensors over a library that only reads host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from wf_backends.comm.protocol import Message, Pending


class Staged(Pending):
    """Messages of device tensors that travel as host copies. Posting and waiting synchronise.

    Args:
        post: posts messages of CPU tensors, as `Communicator._post`.
    """

    def __init__(
        self,
        post: Callable[..., Pending],
        label: str,
        sends: Sequence[Message],
        recvs: Sequence[Message],
    ) -> None:
        self._recvs = recvs
        self._landings = [(peer, torch.empty_like(tensor, device="cpu")) for peer, tensor in recvs]
        self._inner = post(label, [(peer, tensor.cpu()) for peer, tensor in sends], self._landings)

    def wait(self) -> None:
        self._inner.wait()
        for (_, tensor), (_, host) in zip(self._recvs, self._landings, strict=True):
            tensor.detach().copy_(host)

    def poll(self) -> None:
        self._inner.poll()
