"""Do all ranks ask for the same? A header of a few integers tells before anything hangs."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, lru_cache
from os.path import commonprefix
from threading import RLock
from types import MappingProxyType
from typing import cast
from zlib import crc32

import torch
from torch import Tensor

from wf_backends.comm.exchanges import Round, doubling, gather_texts
from wf_backends.comm.protocol import Communicator, Shared

HEADER_INTEGERS = 32  # of all calls, so that no header overruns another's buffer
MAX_REMEMBERED = 1024  # headers; packed documents bring a new one with every batch
NOTHING: Mapping[str, object] = MappingProxyType({})
SHOWN = 160  # characters of what a rank says of itself in an error
REFUSED = -1  # in place of the names' fingerprint: this rank's own arguments are wrong
Lengths = dict[str, tuple[int, ...]]  # those of all ranks, by name


def fingerprint(value: object) -> int:
    """A number that is the same on every rank for values with the same repr."""
    return crc32(repr(value).encode())


@cache
def _kind(names: tuple[str, ...]) -> int:
    """The fingerprint of what a call compares."""
    return fingerprint([*names])


class OneThread:
    """`with` it one thread at a time uses a group; another one that comes meanwhile is refused.

    Ranks match their messages by the order of their calls, which threads would take by chance.
    """

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "two threads use one SequenceParallel at the same time, and the other ranks cannot "
                "tell their messages apart: call from one thread, or give each thread a "
                "SequenceParallel of a group of its own (torch.distributed.new_group())"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class ConsistencyCheck(Shared):
    """Checks, call by call, that the ranks pass tensors and options that belong together.

    Where messages pass through host memory every call is checked. Elsewhere a check would stall
    the device, so only headers that this rank has not sent before are exchanged; the layer alone
    makes no header a new one. Only ranks that differ exchange words.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        one_at_a_time = OneThread() if comm.size > 1 else nullcontext()  # alone: no messages
        self.one_thread: AbstractContextManager[None] = one_at_a_time
        self._seen: dict[tuple[tuple[str, ...], tuple[int, ...]], Lengths] = {}
        self._room = lru_cache(maxsize=8)(self._make_room)

    def check(
        self,
        same: Mapping[str, int],
        lengths: Mapping[str, int],
        like: Tensor,
        remember: bool = True,
        layer: str | None = None,
        words: Mapping[str, object] = NOTHING,
    ) -> Lengths:
        """Exchange a header.

        Args:
            same: what must be equal on all ranks, by the name that the error shows.
            lengths: what may differ.
            like: a tensor on the device that messages live on.
            remember: whether a header like this may be taken as checked from now on.
            layer: which of several calls like this one it is; must be equal too.
            words: what stands behind the numbers of `same`, for the error: by the same names what
                str() puts into words, or a mapping of such things.

        Returns:
            The lengths of all ranks, by name.

        Raises:
            ValueError: on every rank, naming what differs and the values by rank.
        """
        names, values = (*same, *lengths), (*same.values(), *lengths.values())
        if self._seen and (names, values) in self._seen:
            return self._seen[names, values]
        headers = self._exchange((_kind(names), fingerprint(layer), *values), like)
        size = self.comm.size
        if headers == headers[: len(headers) // size] * size:
            found = {name: (length,) * size for name, length in lengths.items()}
        else:
            kinds, layers, *columns = _by_rank(headers, self.comm)
            self._refuse_others(kinds, layers, layer, [*names])
            self._refuse_differing(dict(zip(same, columns, strict=False)), words)
            found = dict(zip(lengths, columns[len(same) :], strict=False))
        if remember and not self.comm.on_host:
            if len(self._seen) == MAX_REMEMBERED:
                del self._seen[next(iter(self._seen))]  # the oldest: the same call on every rank
            self._seen[names, values] = found
        return found

    def __enter__(self) -> None:
        """Begin a block that checks this rank's own arguments: if one fails, all ranks raise.

        The other ranks must be in `check`, or in such a block with errors of their own. Only where
        messages pass through host memory: elsewhere they may have nothing to exchange.
        """

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind and issubclass(kind, (ValueError, NotImplementedError)) and self.comm.on_host:
            with suppress(RuntimeError):  # a dead peer: our own error says more
                self._exchange((REFUSED,), torch.empty(0))

    def _exchange(self, values: tuple[int, ...], like: Tensor) -> array[int]:
        """The headers of all ranks, one after another: of this rank r, of rank r - 1 and so on.

        Each is filled up to a multiple of HEADER_INTEGERS integers.
        """
        length = len(values) + -len(values) % HEADER_INTEGERS
        headers, host, held, rounds = self._room(length, self.comm.home(like))
        with self.one_thread:
            headers[:length] = array("q", values + (0,) * (length - len(values)))
            if held is not host:
                held[0] = host[0]
            for sends, recvs in rounds:
                self.comm.post("agreement", sends, recvs).wait()
            if held is not host:
                host.copy_(held)
        return headers

    def _make_room(
        self, length: int, device: torch.device
    ) -> tuple[array[int], Tensor, Tensor, tuple[Round, ...]]:
        """Room for headers of `length` integers, and the messages that fill it; for all calls.

        Returns:
            The room as integers (read and written without an operator of torch), the same memory
            as a tensor (P, length), its like on the device that messages live on, the messages.
        """
        headers = array("q", bytes(8 * length * self.comm.size))
        with torch.inference_mode(False):  # also later calls write to it
            host = torch.frombuffer(headers, dtype=torch.int64).view(self.comm.size, length)
            held = host if device.type == "cpu" else torch.empty_like(host, device=device)
            return headers, host, held, tuple(doubling(self.comm, held))

    def _refuse_others(
        self, kinds: tuple[int, ...], layers: tuple[int, ...], layer: str | None, names: list[str]
    ) -> None:
        """Refuse to go on if a rank refused its arguments, or makes another call than this one.

        Raises:
            ValueError: naming the ranks, and what they call.
        """
        if refusing := [peer for peer, kind in enumerate(kinds) if kind == REFUSED]:
            raise ValueError(
                f"the ranks do not agree: {self.comm.names_of(refusing)} refuse their own arguments"
            )
        if len({*kinds}) > 1 or len({*layers}) > 1:
            call = f"layer {layer!r}" if layer else f"a call that compares {', '.join(names)}"
            told = by_words(gather_texts(self.comm, call), self.comm.names_of)
            raise ValueError(
                f"the ranks do not agree: {told}. A rank that leaves out a call (LayerDrop, "
                "stochastic depth, a branch that its own data decides) takes part in the wrong one"
            )

    def _refuse_differing(
        self, columns: Mapping[str, tuple[int, ...]], words: Mapping[str, object]
    ) -> None:
        """Refuse to go on if ranks differ.

        Args:
            columns: what must be equal, by name the values by rank.
            words: of this rank's values, by name.

        Raises:
            ValueError: naming what differs and the values.
        """
        differing = {name: values for name, values in columns.items() if len({*values}) > 1}
        if not differing:
            return
        mine = _flat({name: words[name] for name in differing if name in words})
        every: list[dict[str, str]] = [
            json.loads(text)
            for text in (gather_texts(self.comm, json.dumps(mine)) if words else ())
        ]
        told = [f"{n}: {list(values)}" for n, values in differing.items() if n not in words]
        for name in dict.fromkeys(name for one in every for name in one):
            texts = [one.get(name, "not given") for one in every]
            if len({*texts}) > 1:
                told.append(f"{name}: {by_words(texts, self.comm.names_of)}")
        ranks = self.comm.names_of(range(self.comm.size))
        by = f"rank, of {ranks}" if ranks.startswith("global") else "rank"
        raise ValueError(f"the ranks do not agree (values by {by}): {'; '.join(told)}")


def _by_rank(headers: array[int], comm: Communicator) -> Iterator[tuple[int, ...]]:
    """What stands at each place of the headers, by rank."""
    length, rank = len(headers) // comm.size, comm.rank
    rows = [headers[at : at + length] for at in range(0, len(headers), length)]
    return zip(*rows[rank::-1], *rows[:rank:-1], strict=True)


def by_words(texts: list[str], names_of: Callable[[list[int]], str]) -> str:
    """Which ranks say what: "causal (ranks [0, 2]), full (ranks [1])"."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    short = _where_they_differ([*ranks])
    return ", ".join(
        f"{text} ({names_of(of)})" for text, of in zip(short, ranks.values(), strict=True)
    )


def _where_they_differ(texts: list[str]) -> list[str]:
    """Long texts from shortly before their first difference on."""
    same = len(commonprefix(texts))
    start = max(0, same - SHOWN // 4) if max(map(len, texts)) > SHOWN else 0
    cut = [f"{'... ' * bool(start)}{text[start : start + SHOWN]}" for text in texts]
    ends = (" ..." * (len(text) > start + SHOWN) for text in texts)
    return [text + end for text, end in zip(cut, ends, strict=True)]


def _flat(words: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Mappings inside as names of several words."""
    found: dict[str, str] = {}
    for name, value in words.items():
        if isinstance(value, Mapping):
            found |= _flat(cast(Mapping[str, object], value), f"{prefix}{name} ")
        else:
            found[prefix + name] = str(value)
    return found
