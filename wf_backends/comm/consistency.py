"""Check before a call that all ranks make the same call; otherwise they would hang in it."""

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

from wf_backends.comm.exchanges import SendsAndRecvs, doubling, gather_texts
from wf_backends.comm.protocol import Communicator, Shared

HEADER_INTEGERS = 32  # the same for all calls, so that no header is longer than a peer's buffer
MAX_REMEMBERED = 1024  # headers; packed documents bring a new header with every batch
NO_OBJECTS: Mapping[str, object] = MappingProxyType({})
MAX_SHOWN_CHARS = 160  # of one rank's text in an error
REFUSED = -1  # in place of the names' fingerprint: the sender's own arguments are wrong
Lengths = dict[str, tuple[int, ...]]  # by name: the lengths of all ranks


def fingerprint(value: object) -> int:
    """A number that is the same on every rank for values with the same repr."""
    return crc32(repr(value).encode())


_kept_fingerprint = cache(fingerprint)  # of the names that a call compares


class OneThread:
    """A context that one thread at a time may enter; a second thread gets a RuntimeError.

    Ranks match their messages by the order of their calls, which is random between threads.
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

    Where messages pass through host memory, every call is checked. Elsewhere an exchange would
    stall the device: it is skipped if this rank has exchanged the same names and values before, of
    whatever layer. Texts are exchanged only if headers differ.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        one_thread = OneThread() if comm.size > 1 else nullcontext()  # one rank sends no messages
        self.one_thread: AbstractContextManager[None] = one_thread
        self._seen: dict[tuple[tuple[str, ...], tuple[int, ...]], Lengths] = {}
        self._header_buffers = lru_cache(maxsize=8)(self._make_header_buffers)

    def check(
        self,
        same: Mapping[str, int],
        lengths: Mapping[str, int],
        x: Tensor,
        remember: bool = True,
        layer: str | None = None,
        objects: Mapping[str, object] = NO_OBJECTS,
    ) -> Lengths:
        """Exchange a header with all ranks and compare.

        Args:
            same: values that must be equal on all ranks, by the name that the error shows.
            lengths: values that may differ, by name.
            x: a tensor of the call, whose device decides where the header is.
            remember: whether later calls with an equal header may skip the exchange.
            layer: the name of the layer that calls; must be equal too.
            objects: for the error, the objects whose fingerprints are in `same`, by the same names;
                each is shown by str(), or is a mapping of objects that are.

        Returns:
            The lengths of all ranks, by name.

        Raises:
            ValueError: on every rank, naming what differs and the values by rank.
        """
        names, values = (*same, *lengths), (*same.values(), *lengths.values())
        if self._seen and (names, values) in self._seen:
            return self._seen[names, values]
        headers = self._exchange((_kept_fingerprint(names), fingerprint(layer), *values), x)
        size = self.comm.size
        if headers == headers[: len(headers) // size] * size:
            all_lengths = {name: (length,) * size for name, length in lengths.items()}
        else:
            calls, layers, *columns = _by_rank(headers, self.comm)
            self._refuse_other_calls(calls, layers, layer, [*names])
            self._refuse_differing(dict(zip(same, columns, strict=False)), objects)
            all_lengths = dict(zip(lengths, columns[len(same) :], strict=False))
        if remember and not self.comm.on_host:
            if len(self._seen) == MAX_REMEMBERED:
                del self._seen[next(iter(self._seen))]  # the oldest: the same on every rank
            self._seen[names, values] = all_lengths
        return all_lengths

    def __enter__(self) -> None:
        """Begin a block that checks this rank's own arguments: if it raises, all ranks raise.

        The other ranks must be in `check`, or in such a block that raises too. Only where messages
        pass through host memory: elsewhere peers may skip the exchange.
        """

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        refuses = error_type and issubclass(error_type, (ValueError, NotImplementedError))
        if refuses and self.comm.on_host:
            with suppress(RuntimeError):  # of a dead peer: this rank's own error says more
                self._exchange((REFUSED,), torch.empty(0))

    def _exchange(self, values: tuple[int, ...], x: Tensor) -> array[int]:
        """The headers of all ranks, one after another: of this rank r, of rank r - 1 and so on.

        Each header is padded to a multiple of HEADER_INTEGERS integers.
        """
        length = len(values) + -len(values) % HEADER_INTEGERS
        device = self.comm.small_message_device(x)
        headers, host_rows, rows, posts = self._header_buffers(length, device)
        with self.one_thread:
            headers[:length] = array("q", values + (0,) * (length - len(values)))
            if rows is not host_rows:
                rows[0] = host_rows[0]
            for sends, recvs in posts:
                self.comm.post("agreement", sends, recvs).wait()
            if rows is not host_rows:
                host_rows.copy_(rows)
        return headers

    def _make_header_buffers(
        self, length: int, device: torch.device
    ) -> tuple[array[int], Tensor, Tensor, tuple[SendsAndRecvs, ...]]:
        """Buffers for all ranks' headers of `length` integers, and the messages that fill them.

        Returns:
            headers: P * length integers, read and written without an operator of torch; the same
            memory as a tensor (P, length); the tensor on `device` that is sent; its messages.
        """
        headers = array("q", bytes(8 * length * self.comm.size))
        with torch.inference_mode(False):  # later calls, in any mode, write to the buffers
            host_rows = torch.frombuffer(headers, dtype=torch.int64).view(self.comm.size, length)
            rows = host_rows if device.type == "cpu" else torch.empty_like(host_rows, device=device)
            return headers, host_rows, rows, tuple(doubling(self.comm, rows))

    def _refuse_other_calls(
        self, calls: tuple[int, ...], layers: tuple[int, ...], layer: str | None, names: list[str]
    ) -> None:
        """Raise if a rank refused its own arguments, or if ranks make different calls.

        Args:
            calls, layers: fingerprints of the `names` and the `layer` of the call, by rank.
        """
        if refusing := [rank for rank, call in enumerate(calls) if call == REFUSED]:
            raise ValueError(
                f"the ranks do not agree: {self.comm.names_of(refusing)} refuse their own arguments"
            )
        if len({*calls}) > 1 or len({*layers}) > 1:
            text = f"layer {layer!r}" if layer else f"a call that compares {', '.join(names)}"
            texts = texts_with_ranks(gather_texts(self.comm, text), self.comm.names_of)
            raise ValueError(
                f"the ranks do not agree: {texts}. A rank that leaves out a call (LayerDrop, "
                "stochastic depth, a branch that its own data decides) takes part in the wrong one"
            )

    def _refuse_differing(
        self, columns: Mapping[str, tuple[int, ...]], objects: Mapping[str, object]
    ) -> None:
        """Raise if the values of a name, by rank in `columns`, differ; `objects` as in `check`."""
        differing = {name: values for name, values in columns.items() if len({*values}) > 1}
        if not differing:
            return
        own_texts = _flatten({name: objects[name] for name in differing if name in objects})
        gathered = gather_texts(self.comm, json.dumps(own_texts)) if objects else []
        texts_by_rank: list[dict[str, str]] = [json.loads(text) for text in gathered]
        differences = [
            f"{n}: {list(values)}" for n, values in differing.items() if n not in objects
        ]
        for name in dict.fromkeys(name for texts in texts_by_rank for name in texts):
            values = [texts.get(name, "not given") for texts in texts_by_rank]
            if len({*values}) > 1:
                differences.append(f"{name}: {texts_with_ranks(values, self.comm.names_of)}")
        ranks = self.comm.names_of(range(self.comm.size))
        by = f"rank, of {ranks}" if ranks.startswith("global") else "rank"
        raise ValueError(f"the ranks do not agree (values by {by}): {'; '.join(differences)}")


def _by_rank(headers: array[int], comm: Communicator) -> Iterator[tuple[int, ...]]:
    """For each position in a header, the integers of all ranks, by rank."""
    length, size = len(headers) // comm.size, comm.size
    rows = [headers[start : start + length] for start in range(0, len(headers), length)]
    return zip(*(rows[(comm.rank - rank) % size] for rank in range(size)), strict=True)


def texts_with_ranks(texts: list[str], names_of: Callable[[list[int]], str]) -> str:
    """Each text with the ranks that it is from: "causal (ranks [0, 2]), full (ranks [1])"."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_by_text.setdefault(text, []).append(rank)
    shortened = _shorten([*ranks_by_text])
    pairs = zip(shortened, ranks_by_text.values(), strict=True)
    return ", ".join(f"{text} ({names_of(ranks)})" for text, ranks in pairs)


def _shorten(texts: list[str]) -> list[str]:
    """Long texts without what is far before or behind their first difference."""
    start = 0
    if max(map(len, texts)) > MAX_SHOWN_CHARS:
        start = max(0, len(commonprefix(texts)) - MAX_SHOWN_CHARS // 4)
    stop = start + MAX_SHOWN_CHARS
    before = "... " if start else ""
    return [f"{before}{text[start:stop]}{' ...' if len(text) > stop else ''}" for text in texts]


def _flatten(objects: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Texts by name; a value in a mapping gets both names: {"mask": {"band": 1}} -> "mask band"."""
    texts: dict[str, str] = {}
    for name, value in objects.items():
        if isinstance(value, Mapping):
            texts |= _flatten(cast(Mapping[str, object], value), f"{prefix}{name} ")
        else:
            texts[prefix + name] = str(value)
    return texts
