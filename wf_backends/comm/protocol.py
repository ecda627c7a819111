"""The interface of all communicators: post messages, wait for them, count the bytes sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

DEFAULT_TIMEOUT_S = 600.0  # of a wait, where neither the user nor the group has a timeout
Message = tuple[int, Tensor]  # (peer rank, contiguous tensor to send or to receive into)

CONTROL: Mapping[str, int] = MappingProxyType({"agreement": 1, "gather": 2, "bench": 3})
"""Tags of messages that belong to no pass, by their label: headers of a few bytes, measurements."""
UNUSED_TAG = 0  # neither of a pass nor in CONTROL
FIRST_PASS_TAG, NUM_PASS_TAGS = 4, 1 << 14  # MPI guarantees tags of 15 bits


class Pass(NamedTuple):
    """The forward or the backward of an attention call, and the tag of its messages.

    Messages of different passes are never matched. A rank that skips a call, or runs backwards in
    another order than its peers, waits instead of computing with rows of another layer.
    """

    number: int = 0
    """The number of the call, the same on all ranks; 0 before the first call."""
    layer: str | None = None
    phase: str = "forward"  # or "backward"

    def backward(self) -> Pass:
        """The backward of this call."""
        return Pass(self.number, self.layer, "backward")

    def tag(self) -> int:
        """The tag of this pass's messages, the same on all ranks."""
        return FIRST_PASS_TAG + (2 * self.number + (self.phase == "backward")) % NUM_PASS_TAGS

    def __str__(self) -> str:
        if self.number == 0:
            return "no attention call"
        layer = "" if self.layer is None else f"layer {self.layer!r}, "
        return f"{layer}{self.phase} of attention call {self.number}"


NO_PASS = Pass()


class Wait(NamedTuple):
    """A message that a rank waits for."""

    current_pass: Pass  # that the rank is in, or that it ended last
    label: str
    transfer: str  # such as "message from", of the peer
    peer: int
    since: float  # seconds of the monotonic clock

    @property
    def where(self) -> str:
        """The label of the message and the rank's pass, for errors."""
        if self.current_pass.number == 0:
            return f"{self.label!r}"
        # A header after a backward belongs to the next call.
        is_after = self.label in CONTROL and self.current_pass.phase == "backward"
        return f"{self.label!r} ({'after ' if is_after else ''}{self.current_pass})"

    @property
    def tag(self) -> int:
        """The tag of the message."""
        return CONTROL.get(self.label, self.current_pass.tag())


class Pending(Protocol):
    """Messages in flight."""

    def wait(self) -> None:
        """Return when every message has arrived and every send buffer may be reused.

        Raises:
            RuntimeError: if a peer died or did not answer within the timeout. The error names this
                rank, the peer and the label of the step.
        """
        ...

    def poll(self) -> None:
        """Let messages progress, without waiting. Only MPI needs it: it progresses in its calls."""


class Shared:
    """An object that deepcopy does not copy: copies of a model use the same ranks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Communicator(Shared, ABC):
    """The ranks of one sequence-parallel group, numbered 0 to size - 1.

    A backend implements `on_host` and `_post`; everything else is written once. Messages between
    two ranks arrive in the order in which both posted them. All messages that one post sends to a
    peer must be received by one post of that peer, since NCCL starts them as one batch.

    Args:
        global_ranks: the rank in the whole job of every rank of the group; None = the same numbers.
    """

    on_host: bool
    """Whether CPU tensors can be sent, so that a small exchange does not synchronise the device."""
    needs_polls: bool = False
    """Whether messages progress only inside the library's calls, so that `Pending.poll` helps."""

    def __init__(self, rank: int, size: int, global_ranks: Sequence[int] | None = None) -> None:
        self.rank, self.size = rank, size
        self.global_ranks = range(size) if global_ranks is None else global_ranks
        self.sent: defaultdict[str, int] = defaultdict(int)  # bytes, by label
        self.current_pass, self.tag = NO_PASS, NO_PASS.tag()

    def enter(self, new_pass: Pass) -> None:
        """Begin a pass: the next messages get its tag, and only peers in it receive them."""
        self.current_pass, self.tag = new_pass, new_pass.tag()

    def name_of(self, rank: int, suffix: str = "") -> str:
        """A rank's name for errors: "rank 1", or "global rank 5 (rank 1)" where these differ.

        Args:
            suffix: text that follows the rank in the group, such as " of 4".
        """
        name, global_rank = f"rank {rank}{suffix}", self.global_ranks[rank]
        return name if global_rank == rank else f"global rank {global_rank} ({name})"

    def names_of(self, ranks: Sequence[int]) -> str:
        """The names of several ranks for errors, as `name_of`."""
        names, global_ranks = f"ranks {[*ranks]}", [self.global_ranks[rank] for rank in ranks]
        if global_ranks == [*ranks]:
            return names
        return f"global ranks {global_ranks}, {names} of the group"

    @property
    def me(self) -> str:
        """This rank's name for errors, such as "rank 1 of 4"."""
        return self.name_of(self.rank, f" of {self.size}")

    def post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Start all messages together (receives first) and return without waiting.

        Args:
            label: name of the step, in errors and in the byte counts `sent`. Labels in CONTROL are
                not counted.
            sends, recvs: (peer, contiguous tensor); the peer is never this rank. Buffers must
                stay alive and unchanged until the returned object was waited for.
        """
        if sends and label not in CONTROL:
            self.sent[label] += sum([tensor.nbytes for _, tensor in sends])
        return self._post(label, sends, recvs)

    def carries(self, device: torch.device) -> bool:
        """Whether tensors of this device are sent directly, without a copy on another device."""
        return device.type == "cpu" and self.on_host

    def small_message_device(self, x: Tensor) -> torch.device:
        """The device of headers: the CPU, or where CPU tensors cannot be sent, x's or this GPU."""
        if self.on_host:
            return torch.device("cpu")
        on_cpu = x.device.type == "cpu"
        return torch.device("cuda", torch.cuda.current_device()) if on_cpu else x.device

    @abstractmethod
    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending: ...

    def view(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of `ranks` alone, renumbered 0 to len(ranks) - 1, in the same group."""
        return self if list(ranks) == list(range(self.size)) else View(self, ranks)


class View(Communicator):
    """Some ranks of a communicator, renumbered. It makes no new group; the parent counts bytes."""

    def __init__(self, parent: Communicator, ranks: Sequence[int]) -> None:
        global_ranks = [parent.global_ranks[rank] for rank in ranks]
        super().__init__(ranks.index(parent.rank), len(ranks), global_ranks)
        self.parent, self.ranks = parent, tuple(ranks)
        self.on_host, self.needs_polls = parent.on_host, parent.needs_polls
        self.sent = parent.sent

    def enter(self, new_pass: Pass) -> None:
        self.parent.enter(new_pass)

    def carries(self, device: torch.device) -> bool:
        return self.parent.carries(device)

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        return self.parent._post(label, self._renumber(sends), self._renumber(recvs))

    def _renumber(self, messages: Sequence[Message]) -> list[Message]:
        return [(self.ranks[peer], tensor) for peer, tensor in messages]


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
