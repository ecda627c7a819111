"""What every entry function returns: an attached model, and how to detach it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch.utils.hooks import RemovableHandle

from wf_backends import SequenceParallel
from wf_backends.parallel import IGNORE_INDEX, mask_arguments
from wf_transformers.attention.function import Attention
from wf_transformers.replace import set_until, temporarily_replace


class Handle:
    """One attached model. `remove()`, or the end of a `with` block, detaches it.

    Attributes:
        sp: the sequence parallelism of this rank.
        attention: the function that the layers of a Hugging Face model call.
        data_parallel_rank, data_parallel_size: the number of this rank's sequence-parallel group,
            and how many there are: what part of the data it reads. Ranks of a sequence count as
            neighbours: set both in a mesh where they are not, or whose ranks share data otherwise.
        advice: added to errors about batches that differ: how to give ranks the same samples.
        undo: the callbacks that `remove()` runs, in reverse order.
        first: the `FirstStep` that compares the model on its first training batch, if any.
        whole_batches: whether the model is called with whole batches, which its hooks cut.
    """

    averages_tokens = False
    """Whether `loss` is a mean over the tokens of all sequences, not a mean of sequences' means."""

    def __init__(self, sp: SequenceParallel, attention: Attention | None = None) -> None:
        self.sp, self.attention, self.undo = sp, attention or Attention(sp), ExitStack()
        self.data_parallel_rank, self.data_parallel_size = data_parallel(sp)
        self.first: Any = None  # a FirstStep, whose module imports this one
        self.whole_batches = False
        self._warned = False  # of labels at padding
        ranks, how = [*sp.comm.global_ranks], f"shard the data by rank // {sp.size}"
        if ranks != [*range(ranks[0], ranks[0] + sp.size)]:  # of a mesh, as ("sp", "tp")
            how = (
                f"set handle.data_parallel_rank and data_parallel_size, which are those of ranks "
                f"that are neighbours, and here ranks {ranks} share a sequence"
            )
        self.advice = f"all {sp.size} ranks of a sequence read the same samples: {how}"

    def __deepcopy__(self, _: Any) -> Self:
        """A copy of an attached model (an average of weights) runs over the same ranks."""
        return self

    @property
    def name(self) -> str:
        """The `attn_implementation` for models; "" if no name was registered."""
        return self.attention.name

    @property
    def checkpoint_kwargs(self) -> dict[str, Any]:
        """For `model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=...)`.

        Layers that are recomputed in it know the documents of their forward. The model's forwards
        add it to `torch.utils.checkpoint` themselves, unless that has another `context_fn`.
        """
        documents = self.attention.documents
        # not a method: at a checkpoint with such a context_fn torch.compile ends in an error
        context_fn = partial(type(documents).checkpoint_contexts, documents)
        return {"use_reentrant": False, "context_fn": context_fn}

    def report(self) -> dict[str, int]:
        """Bytes this rank's attention sent since the last report, by label."""
        return self.sp.report()

    def shard_batch(
        self, batch: Mapping[str, Any], pad_token_id: int = 0, labels_are_shifted: bool = False
    ) -> dict[str, Any]:
        """`sp.shard_batch` of a full batch that every rank of the group must hold alike.

        Args:
            labels_are_shifted: labels[:, i] is already the target of position i, as for masked
                language models and token classifiers.

        Raises:
            ValueError: for a malformed batch, and on every rank of the group if they hold
                different batches.
        """
        if not self.whole_batches:
            self.compare_first(batch, whole_batches=False)
        batch = self.without_padded_labels(batch)
        with self.advising():
            local = self.sp.shard_batch(batch, pad_token_id, labels_are_shifted)
        documents = self.attention.documents
        documents.used |= documents.scoped and bool(mask_arguments(local))
        return local

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """This rank's share of the loss, scaled so that the mean over all ranks is the loss.

        Args:
            logits: (b, s_local, vocabulary). labels: (b, s_local), already shifted.

        Returns:
            float32 scalar.
        """
        return self.sp.loss(logits, labels) * self.sp.size

    @property
    def awaits_first(self) -> bool:
        """Whether the model is still to be compared on its first batch."""
        return self.first is not None and self.first.due

    def compare_first(self, batch: Mapping[str, Any], **options: Any) -> None:
        """Compare the model on the batch if it is the first one; see `FirstStep.compare`."""
        if self.awaits_first:
            self.first.compare(self, batch, **options)

    def without_padded_labels(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with labels of -100 at padding; warns once if it had other labels there."""
        batch, mask, labels = dict(batch), batch.get("attention_mask"), batch.get("labels")
        if not isinstance(mask, Tensor) or not isinstance(labels, Tensor):
            return batch
        if mask.shape != labels.shape:
            return batch
        labels = labels if labels.is_floating_point() else labels.long()  # uint8 holds no -100
        padded = (mask == 0) & (labels != IGNORE_INDEX)
        if (count := int(padded.sum())) == 0:
            return batch
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{count} labels of this batch are where attention_mask is 0: they are ignored "
                f"here, and count without WallFacer. Set them to {IGNORE_INDEX} to ignore them",
                stacklevel=3,
            )
        return batch | {"labels": labels.masked_fill(padded, IGNORE_INDEX)}

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 1024,
        distributed_sampler_cls: type[DistributedSampler[Any]] = DistributedSampler,
        **options: Any,
    ) -> DataLoader[Any]:
        """Whole batches of `dataset`, the same for all ranks of a sequence-parallel group.

        Args:
            dataset: map-style.
            batch_size: samples per sequence-parallel group.
            distributed_sampler_cls: the sampler's class, such as one that resumes in an epoch.
            options: passed to torch's DataLoader (collate_fn, drop_last, num_workers, ...).

        Raises:
            ValueError: for a dataset that is not map-style, and a sampler of the caller's own.
        """
        refused = [name for name in ("sampler", "batch_sampler") if name in options]
        if refused or not hasattr(dataset, "__len__"):
            problem = f"{refused[0]}= is chosen" if refused else "only map-style datasets are taken"
            raise ValueError(
                f"{problem} here: build a DataLoader that gives part data_parallel_rank of "
                "data_parallel_size, and cut its batches by shard_batch"
            )
        sampler = distributed_sampler_cls(
            dataset, self.data_parallel_size, self.data_parallel_rank, shuffle=shuffle, seed=seed
        )
        return DataLoader(dataset, batch_size, sampler=sampler, **options)

    @contextmanager
    def advising(self, advice: str = "") -> Iterator[None]:
        """Add `advice`, or that of the handle, to every ValueError raised inside."""
        try:
            yield
        except ValueError as error:
            error.add_note(advice or self.advice)
            raise

    def set(self, owner: Any, name: str, value: Any) -> None:
        """owner.name = value, until `remove()`."""
        set_until(self.undo, owner, name, value)

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """`temporarily_replace`, until `remove()`."""
        self.undo.enter_context(temporarily_replace(owner, name, function))

    def before(self, module: nn.Module, hook: Any, first: bool = False) -> RemovableHandle:
        """Call hook(module, args, kwargs) before each forward of a module, until `remove()`.

        Args:
            hook: returns None, or the (args, kwargs) that the forward gets.
            first: whether it runs before the hooks that the module has.
        """
        registered = module.register_forward_pre_hook(hook, prepend=first, with_kwargs=True)
        self.undo.callback(registered.remove)
        return registered

    def after(self, module: nn.Module, hook: Any, always: bool = False) -> None:
        """Call hook(module, args, output) after each forward of a module, until `remove()`; with
        `always` also after one that raised. It returns None, or what replaces the output."""
        self.undo.callback(module.register_forward_hook(hook, always_call=always).remove)

    def remove(self) -> None:
        """Undo everything that was attached. A second call does nothing."""
        self.undo.close()

    @contextmanager
    def removed_on_error(self) -> Iterator[Self]:
        """Call `remove()` if an error is raised inside."""
        try:
            yield self
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def recorded_changes(handle: Handle) -> AbstractContextManager[Any]:
    """Record what is changed on the handle's model inside; see `Changes.recorded`."""
    return nullcontext() if handle.first is None else handle.first.changes.recorded()


def data_parallel(sp: SequenceParallel, group: ProcessGroup | None = None) -> tuple[int, int]:
    """(number of this rank's sequence-parallel group, how many groups there are).

    Args:
        group: the ranks over which gradients are averaged. None: all of the job.
    """
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group) // sp.size, dist.get_world_size(group) // sp.size
