"""Messages of device tensors through a library that only reads host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from wf_backends.comm.protocol import Message, Pending


class Staged(Pending):
    """Messages of device tensors, sent as host copies. Posting and waiting synchronise the device.

    Args:
        post: posts messages of CPU tensors, like `Communicator._post`.
    """

    def __init__(
        self,
        post: Callable[..., Pending],
        label: str,
        sends: Sequence[Message],
        recvs: Sequence[Message],
    ) -> None:
        self._recvs = recvs
        self._host_recvs = [(peer, torch.empty_like(x, device="cpu")) for peer, x in recvs]
        self._inner = post(label, [(peer, x.cpu()) for peer, x in sends], self._host_recvs)

    def wait(self) -> None:
        self._inner.wait()
        for (_, tensor), (_, host_copy) in zip(self._recvs, self._host_recvs, strict=True):
            tensor.detach().copy_(host_copy)

    def poll(self) -> None:
        self._inner.poll()
