"""Do all ranks ask for the same? A header of a few integers tells before anything hangs."""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor

from wf_backends.comm.protocol import Communicator


def fingerprint(value: object) -> int:
    """A number that is the same on every rank for values with the same repr."""
    return crc32(repr(value).encode())


def sum_over_ranks(comm: Communicator, x: Tensor) -> Tensor:
    """The sum of a small tensor over all ranks, without a gradient. Not counted as traffic."""
    return _everyones(comm, x.to(_home(comm, x)), "sum").sum(0).to(x.device)


def gather_small(comm: Communicator, x: Tensor) -> Tensor:
    """The small tensors of all ranks, stacked by rank. Not counted as traffic."""
    return _everyones(comm, x.to(_home(comm, x)), "gather").to(x.device)


def _everyones(comm: Communicator, mine: Tensor, label: str) -> Tensor:
    """The tensors of all ranks, stacked by rank.

    Rank r passes what it holds to the rank as far ahead as it holds tensors, so that every round
    doubles them: ceil(log2 P) messages of a rank, not P - 1 (Bruck et al. 1997, section 3).
    """
    held = mine.unsqueeze(0)  # row i is of rank r - i
    while (ahead := len(held)) < comm.size:
        out = held[: comm.size - ahead]
        into = torch.empty_like(out)
        to, source = (comm.rank + ahead) % comm.size, (comm.rank - ahead) % comm.size
        comm.post_control(label, [(to, out)], [(source, into)]).wait()
        held = torch.cat((held, into))
    return held[[(comm.rank - rank) % comm.size for rank in range(comm.size)]]


class Agreement:
    """Checks, call by call, that the ranks pass tensors and options that belong together.

    Where messages pass through host memory every call is checked. Elsewhere a check would stall
    the device, so only headers that this rank has not sent before are exchanged.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._seen: dict[tuple[tuple[str, int], ...], list[list[int]]] = {}

    def check(
        self,
        same: Mapping[str, int],
        lengths: Mapping[str, int],
        like: Tensor,
        remember: bool = True,
    ) -> dict[str, list[int]]:
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
        headers = self._seen.get(key)
        if headers is None:
            values = [value for _, value in key]
            mine = torch.tensor(values, dtype=torch.int64, device=_home(self.comm, like))
            headers = _everyones(self.comm, mine, "agreement").tolist()
            if remember and not self.comm.on_host:
                self._seen[key] = headers
        columns = dict(zip([*same, *lengths], zip(*headers, strict=True), strict=True))
        differing = {name: columns[name] for name in same if len(set(columns[name])) > 1}
        if differing:
            told = "; ".join(f"{name}: {list(values)}" for name, values in differing.items())
            raise ValueError(f"the ranks do not agree (values by rank): {told}")
        return {name: list(columns[name]) for name in lengths}


def _home(comm: Communicator, like: Tensor) -> torch.device:
    """The device that small messages live on: a host tensor cannot travel by NCCL alone."""
    if comm.on_host:
        return torch.device("cpu")
    here = like.device
    return here if here.type != "cpu" else torch.device("cuda", torch.cuda.current_device())
