"""What every communicator gives: one way to post messages, and what it counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

DEFAULT_TIMEOUT_S = 600.0  # seconds that a wait waits where nobody said otherwise
Message = tuple[int, Tensor]  # (peer rank, contiguous tensor to send or to receive into)

CONTROL: Mapping[str, int] = MappingProxyType({"agreement": 1, "gather": 2, "bench": 3})
"""Tags of messages that belong to no pass, by their label: headers of a few bytes, measurements."""
NOBODYS_TAG, FIRST_TAG, TAGS = 0, 4, 1 << 14  # of passes; MPI promises 15 bits


class Pass(NamedTuple):
    """The forward or the backward of an attention call, and the tag of its messages.

    Messages of different passes never meet: a rank that leaves out a call, or takes backwards in
    another order than its peers, waits; it does not compute with rows of another layer.
    """

    number: int = 0
    """Of the call, counted alike on all ranks; 0 before the first."""
    layer: str | None = None
    way: str = "forward"

    def back(self) -> Pass:
        """The backward of this call."""
        return Pass(self.number, self.layer, "backward")

    def tag(self) -> int:
        """The same on all ranks."""
        return FIRST_TAG + (2 * self.number + (self.way == "backward")) % TAGS

    def __str__(self) -> str:
        if not self.number:
            return "no attention call"
        layer = "" if self.layer is None else f"layer {self.layer!r}, "
        return f"{layer}{self.way} of attention call {self.number}"


NO_PASS = Pass()


class Wait(NamedTuple):
    """What a rank waits for."""

    now: Pass
    label: str
    kind: str
    """Such as "message from"."""
    peer: int
    since: float
    """Seconds of the monotonic clock."""

    @property
    def where(self) -> str:
        """The label of the messages, and the pass that they belong to."""
        if not self.now.number:
            return f"{self.label!r}"
        later = self.label in CONTROL and self.now.way == "backward"  # of a batch, before a forward
        return f"{self.label!r} ({'after ' * later}{self.now})"

    @property
    def tag(self) -> int:
        """That its messages travel under."""
        return CONTROL.get(self.label, self.now.tag())


class Pending(Protocol):
    """Messages in flight."""

    def wait(self) -> None:
        """Return when every receive has landed and every send buffer may be reused.

        Raises:
            RuntimeError: if a peer died or did not answer within the timeout; the message names
                this rank, the peer and the label of the step.
        """
        ...

    def poll(self) -> None:
        """Let messages move on without waiting. Only MPI needs it: it moves them in calls alone."""


class Shared:
    """What copies of a model share, since they are spread over the same ranks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Communicator(Shared, ABC):
    """The ranks of one sequence-parallel group, numbered 0 to size - 1.

    A backend implements `on_host` and `_post`; everything else is written once. Messages between
    one pair of ranks arrive in the order in which both sides posted them, and what one post sends
    to a peer is what one post of that peer receives: NCCL starts it as one.

    Args:
        global_ranks: the ranks in the whole job, by their ranks here; None = the same.
    """

    on_host: bool
    """Whether CPU tensors can be exchanged, so that a tiny exchange costs no device sync."""
    needs_polls: bool = False
    """Whether messages move only inside the library's calls, so that `Pending.poll` helps."""

    def __init__(self, rank: int, size: int, global_ranks: Sequence[int] | None = None) -> None:
        self.rank, self.size = rank, size
        self.global_ranks = range(size) if global_ranks is None else global_ranks
        self.sent: defaultdict[str, int] = defaultdict(int)
        self.now, self.tag = NO_PASS, NO_PASS.tag()

    def enter(self, now: Pass) -> None:
        """Say which pass the next messages belong to; a peer that is in another gets none."""
        self.now, self.tag = now, now.tag()

    def name_of(self, rank: int, more: str = "") -> str:
        """A rank in an error: as the job numbers it, and as this group does where that differs.

        Args:
            more: what else to say of it as this group's.
        """
        here, everywhere = f"rank {rank}{more}", self.global_ranks[rank]
        return here if everywhere == rank else f"global rank {everywhere} ({here})"

    def names_of(self, ranks: Sequence[int]) -> str:
        """Several ranks in an error, likewise."""
        everywhere = [self.global_ranks[rank] for rank in ranks]
        here = f"ranks {[*ranks]}"
        return here if everywhere == [*ranks] else f"global ranks {everywhere}, {here} of the group"

    @property
    def me(self) -> str:
        """This rank in an error."""
        return self.name_of(self.rank, f" of {self.size}")

    def watch(self) -> None:
        """From now on have waits noticed that will not end, where ranks are processes."""
        return

    def post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        """Start all messages at once (receives first) and return without waiting.

        Args:
            label: names the step for error messages and for the byte count, from which those in
                CONTROL are left out.
            sends, recvs: (peer, contiguous tensor); the peer is never this rank. Buffers must
                stay alive and untouched until the returned object was waited for.
        """
        if sends and label not in CONTROL:
            self.sent[label] += sum([tensor.nbytes for _, tensor in sends])
        return self._post(label, sends, recvs)

    def carries(self, device: torch.device) -> bool:
        """Whether tensors of a device travel as they are: from it no copy is made, nor to it."""
        return device.type == "cpu" and self.on_host

    def home(self, like: Tensor) -> torch.device:
        """The device that small messages live on: a host tensor cannot travel by NCCL alone."""
        if self.on_host:
            return torch.device("cpu")
        here = like.device
        return here if here.type != "cpu" else torch.device("cuda", torch.cuda.current_device())

    @abstractmethod
    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending: ...

    def view(self, ranks: Sequence[int]) -> Communicator:
        """The same communicator seen by `ranks` alone, renumbered 0 to len(ranks) - 1."""
        return self if list(ranks) == list(range(self.size)) else View(self, ranks)


class View(Communicator):
    """Some ranks of a communicator, renumbered. No new group is made; bytes count in the parent."""

    def __init__(self, parent: Communicator, ranks: Sequence[int]) -> None:
        everywhere = [parent.global_ranks[rank] for rank in ranks]
        super().__init__(ranks.index(parent.rank), len(ranks), everywhere)
        self.parent, self.ranks = parent, tuple(ranks)
        self.on_host, self.needs_polls = parent.on_host, parent.needs_polls
        self.sent = parent.sent

    def enter(self, now: Pass) -> None:
        self.parent.enter(now)

    def watch(self) -> None:
        self.parent.watch()

    def carries(self, device: torch.device) -> bool:
        return self.parent.carries(device)

    def _post(self, label: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        return self.parent._post(label, self._renumber(sends), self._renumber(recvs))

    def _renumber(self, messages: Sequence[Message]) -> list[Message]:
        return [(self.ranks[peer], tensor) for peer, tensor in messages]
