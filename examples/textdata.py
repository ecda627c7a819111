"""Real text as packed sequences of bytes, streamed file by file.

A document is one file: a begin token, then its bytes. Documents are packed end to end into
sequences of exactly `seq_len` tokens. Where a document does not fit, its rest starts the next
sequence as a new document, so attention and positions never cross a border.
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
SHUFFLE_TOKENS = 2**18  # size of the window in which sequences are shuffled


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """S tokens and the borders 0 = c0 < c1 < ... = S of the documents in them."""

    tokens: Sequence[int]
    borders: tuple[int, ...]

    def batch(self) -> dict[str, Tensor | tuple[int, ...]]:
        """The arguments of `shard_batch`: "input_ids", "labels" (1, S) int64, and "cu_seqlens"."""
        ids = torch.tensor([self.tokens])
        return {"input_ids": ids, "labels": ids.clone(), "cu_seqlens": self.borders}


def find_files(patterns: Sequence[str] = ()) -> list[Path]:
    """Files that match the patterns, sorted; the sources of Python's library without patterns.

    Raises:
        ValueError: if a pattern matches no file.
    """
    if not patterns:
        library = Path(sysconfig.get_paths()["stdlib"])
        sources = (path.relative_to(library) for path in library.rglob("*.py"))
        return sorted(library / path for path in sources if "site-packages" not in path.parts)
    files: set[Path] = set()
    for pattern in patterns:
        paths = (Path(name) for name in glob.glob(pattern, recursive=True))
        matched = {path for path in paths if path.is_file()}
        if not matched:
            raise ValueError(f"--data {pattern!r} matches no file")
        files |= matched
    return sorted(files)


def split(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """(training files, held-out files): every 20th is held out; a single file is both."""
    held_out = list(files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]) or list(files[-1:])
    training = [path for path in files if path not in set(held_out)] or list(files)
    return training, held_out


def read_forever(files: Sequence[Path], seed: int) -> Iterator[list[int]]:
    """Documents as token lists, epoch after epoch in a new order; skips empty files.

    Raises:
        ValueError: if all files are empty.
    """
    for epoch in count():
        has_text = False
        for path in _shuffled(files, seed, epoch):
            content = path.read_bytes()
            if content:
                has_text = True
                yield [BEGIN, *content]
        if not has_text:
            raise ValueError(f"the {len(files)} data files hold no byte of text")


def pack(documents: Iterator[list[int]], seq_len: int) -> Iterator[PackedSequence]:
    """Pack documents end to end into sequences of seq_len tokens.

    Yields a sequence as soon as it is full, before it reads the next document. Drops a last,
    incomplete sequence.
    """
    tokens: list[int] = []
    borders = [0]
    for document in documents:
        while document:
            free = seq_len - len(tokens)
            tokens += document[:free]
            document = document[free:]
            borders.append(len(tokens))
            if len(tokens) == seq_len:
                yield PackedSequence(tokens, tuple(borders))
                tokens, borders = [], [0]


def shuffle(packed: Iterator[PackedSequence], window: int, seed: int) -> Iterator[PackedSequence]:
    """Shuffle the sequences within windows of `window` sequences.

    A long file fills many sequences; in order, it would be the only text of many steps.
    """
    for index in count():
        sequences_of_window = list(islice(packed, window))
        if not sequences_of_window:
            return
        yield from _shuffled(sequences_of_window, seed, index)


def _shuffled(items: Sequence[T], seed: int, epoch: int) -> list[T]:
    """A shuffled copy; the order follows from seed and epoch, and is the same on all ranks."""
    order = list(items)
    random.Random(seed * 1_000_003 + epoch).shuffle(order)
    return order


def sequences(
    files: Sequence[Path],
    seq_len: int,
    seed: int,
    skip: int = 0,
    dp_rank: int = 0,
    dp_size: int = 1,
) -> Iterator[PackedSequence]:
    """The sequences of one data-parallel rank: skip + dp_rank, skip + dp_rank + dp_size, ...

    Args:
        skip: sequences that all ranks together have trained on before.
        dp_rank, dp_size: this data-parallel rank, and how many there are.
    """
    packed = pack(read_forever(files, seed), seq_len)
    shuffled = shuffle(packed, max(1, SHUFFLE_TOKENS // seq_len), seed)
    return islice(shuffled, skip + dp_rank, None, dp_size)
