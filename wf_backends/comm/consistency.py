"""Do all ranks ask for the same? A header of a few integers tells before anything hangs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from zlib import crc32

import torch
from torch import Tensor

from wf_backends.comm.protocol import Communicator

HEADER_INTEGERS = 16  # of all calls, so that no header overruns another's buffer
MAX_REMEMBERED = 1024  # headers; packed documents bring a new one with every batch
REFUSED = -1  # in place of the names' fingerprint: this rank's own arguments are wrong


def fingerprint(value: object) -> int:
    """A number that is the same on every rank for values with the same repr."""
    return crc32(repr(value).encode())


@cache
def _kind(names: tuple[str, ...]) -> int:
    """The fingerprint of what a call compares."""
    return fingerprint([*names])


def sum_over_ranks(comm: Communicator, x: Tensor) -> Tensor:
    """The sum of a small tensor over all ranks, without a gradient. Not counted as traffic."""
    return gather_small(comm, x).sum(0)


def gather_small(comm: Communicator, x: Tensor) -> Tensor:
    """The small tensors of all ranks, stacked by rank. Not counted as traffic."""
    device = x.device if comm.carries(x.device) else _home(comm, x)  # a host copy waits for x
    found = _by_distance(comm, x.to(device), "gather")
    return found.flip(0).roll(comm.rank + 1, 0).to(x.device)


def _by_distance(comm: Communicator, mine: Tensor, label: str) -> Tensor:
    """The tensors of all ranks, stacked: row i is that of rank r - i.

    Rank r passes what it holds to the rank as far ahead as it holds tensors, so that every round
    doubles them: ceil(log2 P) messages of a rank, not P - 1 (Bruck et al. 1997, section 3).
    """
    rank, size = comm.rank, comm.size
    held = mine.new_empty((size, *mine.shape))
    held[0] = mine
    ahead = 1
    while ahead < size:
        count = min(ahead, size - ahead)
        out, into = held[:count], held[ahead : ahead + count]
        sends, recvs = [((rank + ahead) % size, out)], [((rank - ahead) % size, into)]
        comm.post_control(label, sends, recvs).wait()
        ahead += count
    return held


class Agreement:
    """Checks, call by call, that the ranks pass tensors and options that belong together.

    Where messages pass through host memory every call is checked. Elsewhere a check would stall
    the device, so only headers that this rank has not sent before are exchanged.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._seen: dict[tuple[tuple[str, int], ...], dict[str, tuple[int, ...]]] = {}

    def check(
        self,
        same: Mapping[str, int],
        lengths: Mapping[str, int],
        like: Tensor,
        remember: bool = True,
    ) -> dict[str, tuple[int, ...]]:
        """Exchange a header.

        Args:
            same: what must be equal on all ranks, by the name that the error shows.
            lengths: what may differ.
            like: a tensor on the device that messages live on.
            remember: whether a header like this may be taken as checked from now on.

        Returns:
            The lengths of all ranks, by name.

        Raises:
            ValueError: on every rank, naming what differs and the values by rank.
        """
        key = (*same.items(), *lengths.items())
        if key in self._seen:
            return self._seen[key]
        names = (*same, *lengths)
        headers = self._exchange([_kind(names), *same.values(), *lengths.values()], like)
        kinds, *columns = zip(*headers, strict=True)
        if headers.count(headers[0]) < len(headers):
            _check_calls(kinds, [*names], self.comm.rank)
            _refuse_differing(dict(zip(same, columns, strict=False)))
        found = dict(zip(lengths, columns[len(same) :], strict=False))
        if remember and not self.comm.on_host:
            if len(self._seen) == MAX_REMEMBERED:
                del self._seen[next(iter(self._seen))]  # the oldest: the same call on every rank
            self._seen[key] = found
        return found

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around checks of this rank's own arguments: if they fail, the others raise, not wait.

        The others are in `check`, or in `telling` with errors of their own. Only where messages
        pass through host memory: elsewhere they may have nothing to exchange.
        """
        try:
            yield
        except (ValueError, NotImplementedError):
            if self.comm.on_host:
                with suppress(RuntimeError):  # a dead peer: our own error says more
                    self._exchange([REFUSED], torch.empty(0))
            raise

    def _exchange(self, values: list[int], like: Tensor) -> list[list[int]]:
        """All headers, by rank, each filled up to a multiple of HEADER_INTEGERS integers."""
        filled = values + [0] * (-len(values) % HEADER_INTEGERS)
        mine = torch.tensor(filled, dtype=torch.int64, device=_home(self.comm, like))
        rows, rank = _by_distance(self.comm, mine, "agreement").tolist(), self.comm.rank
        return rows[rank::-1] + rows[:rank:-1]


def _check_calls(kinds: tuple[int, ...], names: list[str], rank: int) -> None:
    """Refuse to go on if a rank refused its arguments, or makes another kind of call.

    Raises:
        ValueError: naming the ranks.
    """
    if refusing := [peer for peer, kind in enumerate(kinds) if kind == REFUSED]:
        raise ValueError(f"the ranks do not agree: ranks {refusing} refuse their own arguments")
    if others := [peer for peer, kind in enumerate(kinds) if kind != kinds[rank]]:
        raise ValueError(
            f"the ranks do not agree: rank {rank} compares {names}, ranks {others} something else"
        )


def _refuse_differing(columns: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse to go on if ranks differ.

    Args:
        columns: what must be equal, by name the values by rank.

    Raises:
        ValueError: naming what differs and the values.
    """
    told = [f"{name}: {list(values)}" for name, values in columns.items() if len({*values}) > 1]
    if told:
        raise ValueError(f"the ranks do not agree (values by rank): {'; '.join(told)}")


def _home(comm: Communicator, like: Tensor) -> torch.device:
    """The device that small messages live on: a host tensor cannot travel by NCCL alone."""
    if comm.on_host:
        return torch.device("cpu")
    here = like.device
    return here if here.type != "cpu" else torch.device("cuda", torch.cuda.current_device())
