"""The class of `engine.wallfacer`: shards batches, computes losses, counts valid labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from wf_backends.parallel import count_valid, token_loss
from wf_deepspeed.config import Block
from wf_deepspeed.mpu import Groups
from wf_transformers import Handle


class WallFacer(Handle):
    """The handle of one DeepSpeed engine.

    Args:
        attached: the handle of the engine's model.
        accumulation: returns the number of micro-batches of an optimizer step.

    Attributes:
        block: the "wallfacer" block of the JSON.
        groups: the process groups of this rank.
    """

    def __init__(
        self,
        attached: Handle,
        block: Block,
        groups: Groups,
        device: torch.device,
        accumulation: Callable[[], int],
    ) -> None:
        vars(self).update(vars(attached))  # they share one undo stack
        self.block, self.groups = block, groups
        self.averages_tokens = block.loss_average == "token"
        self._device, self._accumulation = device, accumulation
        self.advice = (
            f"all {self.sp.size} ranks of a sequence-parallel group read the same samples: shard "
            f"the data by engine.wallfacer.data_parallel_rank (of {self.data_parallel_size}), not "
            f"by rank"
        )

    def shard_batch(
        self, batch: Mapping[str, Any], pad_token_id: int = 0, labels_are_shifted: bool = False
    ) -> dict[str, Any]:
        """Move the batch to the engine's device, and do what `Handle.shard_batch` does. With "dsp"
        the batch stays whole."""
        batch = {k: x.to(self._device) if isinstance(x, Tensor) else x for k, x in batch.items()}
        if self.block.dsp is None:
            return super().shard_batch(batch, pad_token_id, labels_are_shifted)
        with self.advising():
            self.sp.check_same(batch)
        return batch

    def loss(self, logits: Tensor, labels: Tensor, valid: Tensor | int | None = None) -> Tensor:
        """Return the loss of this rank's tokens, scaled for DeepSpeed's mean over the world.

        The mean of this loss over all ranks is the loss of the whole batch; see `mean`. With "dsp"
        it is the mean cross entropy of whole logits and labels; the model's own loss does as well.

        Args:
            logits: (b, s_local, vocabulary). labels: (b, s_local), already shifted.
            valid: number of valid labels of the whole optimizer step, from `count_valid` or a
                batch of `dataloader`. Needed for "loss_average": "token" with gradient
                accumulation; not used for "sequence".

        Returns:
            float32 scalar.

        Raises:
            ValueError: if `valid` is missing where it is needed.
        """
        if not self.averages_tokens:
            return super().loss(logits, labels)
        steps = self._accumulation()
        if valid is None and steps > 1:
            raise ValueError(
                f'"loss_average": "token" with "gradient_accumulation_steps": {steps} needs '
                f"valid=, the valid labels of all {steps} micro-batches: batch['valid_labels'] of "
                f"engine.wallfacer.dataloader, or engine.wallfacer.count_valid"
            )
        if valid is None:
            valid = self.count_valid([{"labels": labels}])
        share = dist.get_world_size(self.groups.world) * steps
        return token_loss(logits, labels, valid) * share

    def count_valid(self, batches: Iterable[Mapping[str, Any]]) -> int:
        """Count the valid labels of sharded micro-batches over all ranks of the world."""
        local = sum(int(count_valid(batch["labels"])) for batch in batches)
        count = torch.tensor(local, device=self._device)
        dist.all_reduce(count, group=self.groups.world)
        return int(count)

    def mean(self, loss: Tensor) -> Tensor:
        """Return the mean of `loss` over the world, detached, the same on every rank: for logs."""
        total = loss.detach().to(self._device, torch.float32, copy=True)
        dist.all_reduce(total, group=self.groups.world)
        return total / dist.get_world_size(self.groups.world)

    def dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        pad_token_id: int = 0,
        labels_are_shifted: bool = False,
        **options: Any,
    ) -> ShardedLoader:
        """Return a loader of this rank's shards of batches; a group's ranks share each batch.

        Args:
            dataset: map-style; its collated batches are dicts as for `shard_batch`.
            pad_token_id, labels_are_shifted: as for `shard_batch`.
            batch_size, shuffle, seed, options: as for `prepare_dataloader`.
        """
        loader = self.prepare_dataloader(dataset, batch_size, shuffle=shuffle, seed=seed, **options)
        return ShardedLoader(self, loader, pad_token_id, labels_are_shifted)

    def step_batches(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield sharded batches with "valid_labels", the count of their whole optimizer step.

        Reads the batches of one optimizer step ahead. An incomplete last step is dropped.
        """
        steps, iterator = self._accumulation(), iter(batches)
        while len(micro_batches := list(islice(iterator, steps))) == steps:
            valid = self.count_valid(micro_batches)
            yield from (batch | {"valid_labels": valid} for batch in micro_batches)


class ShardedLoader:
    """Iterates over this rank's shards of batches; its `sampler` has torch's `set_epoch`."""

    def __init__(self, handle: WallFacer, loader: DataLoader[Any], *arguments: Any) -> None:
        """`arguments`: those of `shard_batch` after the batch."""
        self._handle, self._loader, self._arguments = handle, loader, arguments
        self.sampler = loader.sampler

    def __len__(self) -> int:
        """Without the incomplete last step that `step_batches` drops."""
        steps = self._handle._accumulation() if self._handle.averages_tokens else 1
        return len(self._loader) // steps * steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        shards = (self._handle.shard_batch(batch, *self._arguments) for batch in self._loader)
        return self._handle.step_batches(shards) if self._handle.averages_tokens else shards
