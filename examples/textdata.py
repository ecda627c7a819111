"""Real text as packed sequences of bytes, streamed file by file.

A document is one file: a begin token, then its bytes. Documents are laid end to end into sequences
of exactly `seq_len` tokens; one that does not fit goes on in the next sequence as a document of its
own, so attention and positions never cross a border.
"""

from __future__ import annotations

import glob
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
BEGIN = 256  # starts a document; 0-255 are the bytes themselves
VOCABULARY = 264  # 257 tokens, rounded up to a multiple of 8
HELD_OUT_EVERY = 20  # every 20th file is never trained on
SHUFFLED = 2**18  # tokens whose sequences are shuffled together, so that steps are alike


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """S tokens and the borders 0 = c0 < c1 < ... = S of the documents in them."""

    tokens: bytes | Sequence[int]
    borders: tuple[int, ...]

    def batch(self) -> dict[str, Tensor | tuple[int, ...]]:
        """As `shard_batch` takes it: "input_ids", "labels" (1, S) int64, and "cu_seqlens"."""
        ids = torch.tensor([list(self.tokens)])
        return {"input_ids": ids, "labels": ids.clone(), "cu_seqlens": self.borders}


def find_files(patterns: Sequence[str] = ()) -> list[Path]:
    """Files that match the patterns, sorted; without any, the Python standard library's sources.

    Raises:
        ValueError: if a pattern matches no file.
    """
    if not patterns:
        library = Path(sysconfig.get_paths()["stdlib"])
        found = (p.relative_to(library) for p in library.rglob("*.py"))
        return sorted(library / p for p in found if "site-packages" not in p.parts)
    files: set[Path] = set()
    for pattern in patterns:
        matched = {Path(name) for name in glob.glob(pattern, recursive=True)}
        if not (hits := {path for path in matched if path.is_file()}):
            raise ValueError(f"--data {pattern!r} matches no file")
        files |= hits
    return sorted(files)


def split(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """(training files, held-out files): every 20th is held out; a single file is both."""
    held_out = list(files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]) or list(files[-1:])
    training = [path for path in files if path not in set(held_out)] or list(files)
    return training, held_out


def read_forever(files: Sequence[Path], seed: int) -> Iterator[list[int]]:
    """Documents as token lists, in a new order each epoch; empty files are left out.

    Raises:
        ValueError: if all files are empty.
    """
    for epoch in count():
        order = _shuffled(files, seed, epoch)
        empty = True
        for path in order:
            if content := path.read_bytes():
                empty = False
                yield [BEGIN, *content]
        if empty:
            raise ValueError(f"the {len(order)} data files hold no byte of text")


def pack(documents: Iterator[list[int]], seq_len: int) -> Iterator[PackedSequence]:
    """Lay documents end to end into sequences of seq_len tokens; reads no further than it must.

    A last, incomplete sequence is dropped.
    """
    tokens: list[int] = []
    borders = [0]
    for document in documents:
        while document:
            room = seq_len - len(tokens)
            tokens += document[:room]
            document = document[room:]
            borders.append(len(tokens))
            if len(tokens) == seq_len:
                yield PackedSequence(tokens, tuple(borders))
                tokens, borders = [], [0]


def mix(packed: Iterator[PackedSequence], among: int, seed: int) -> Iterator[PackedSequence]:
    """The same sequences, every `among` of them in a new order.

    A long file fills many sequences: one after the other they would be many steps on nothing else.
    """
    for number in count():
        if not (drawn := list(islice(packed, among))):
            return
        yield from _shuffled(drawn, seed, number)


def _shuffled(items: Sequence[T], seed: int, number: int) -> list[T]:
    """A new list in an order that follows from the two numbers."""
    order = list(items)
    random.Random(seed * 1_000_003 + number).shuffle(order)
    return order


def sequences(
    files: Sequence[Path], seq_len: int, seed: int, skip: int = 0, part: int = 0, parts: int = 1
) -> Iterator[PackedSequence]:
    """Sequences skip + part, skip + part + parts, ... of an endless stream.

    Args:
        skip: sequences that were trained on before (all parts together).
        part, parts: this data-parallel rank and how many there are.
    """
    packed = pack(read_forever(files, seed), seq_len)
    mixed = mix(packed, max(1, SHUFFLED // seq_len), seed)
    return islice(mixed, skip + part, None, parts)
