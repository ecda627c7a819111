"""Datasets without a length (`IterableDataset`) for groups of ranks: who reads which samples."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.state import GradientState


class Stream(IterableDatasetShard):
    """The samples of one group, a "process" of accelerate here.

    The last samples, too few for a batch of every group, are divided evenly. Only the number that
    is missing for that is filled up, by the first samples. accelerate's rank 0 does the same when
    it dispatches batches, accelerate's default; its own IterableDatasetShard fills whole batches.

    Attributes:
        rest: () int64, the number of last samples, 0 if every group has a whole batch of them. In
            shared memory, since a loader's worker may be what reads.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rest = torch.zeros((), dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Any]:
        groups, samples, first = self.num_processes, iter(self.dataset), []
        size = self.batch_size if self.split_batches else self.batch_size * groups
        self.rest.zero_()
        while batch := list(islice(samples, size)):
            first = first or batch[:groups]
            if len(batch) < size:
                if self.drop_last:
                    return
                self.rest.fill_(len(batch))
                batch += islice(cycle(first), -len(batch) % groups)
            share = len(batch) // groups
            yield from batch[self.process_index * share : (self.process_index + 1) * share]


def drop_repeated_samples() -> None:
    """Have `gather_for_metrics` drop the samples that filled up the last batch of a `Stream`.

    Several workers of a loader each have last samples of their own: then nothing is dropped.
    """
    loader: Any = GradientState().active_dataloader
    stream = getattr(loader, "dataset", None)
    if isinstance(stream, Stream) and loader.num_workers < 2:
        loader.remainder = int(stream.rest)
