"""The same sequence parallelism under booster plugins that have none of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from wf_backends import SequenceParallelConfig, dsp
from wf_backends.comm import own_group
from wf_colossalai.connect import connect, connect_stages
from wf_colossalai.sequence import PlainSequenceParallel
from wf_colossalai.table import TABLE, AttentionModule
from wf_transformers import Application


class Applied:
    """What `apply` did to one model.

    Attributes:
        sp: the sequence parallelism of this rank; `sp.report()` has the bytes it sent.
        application: how the model got it; `application.remove()` takes it out again.
        data_parallel_size, data_parallel_rank: sequence-parallel groups of the group, and ours.
    """

    def __init__(self, application: Application, group: ProcessGroup | None) -> None:
        self.application, self.sp = application, application.attention.sp
        self.data_parallel_size = dist.get_world_size(group) // self.sp.size
        self.data_parallel_rank = dist.get_rank(group) // self.sp.size

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 1024,
        **options: Any,
    ) -> DataLoader[Any]:
        """Batches of `dataset`, the same for all ranks of a sequence-parallel group.

        Args:
            dataset: map-style.
            batch_size: samples per sequence-parallel group.
            options: passed to torch's DataLoader (collate_fn, drop_last, num_workers, ...).
        """
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, self.data_parallel_size, self.data_parallel_rank, shuffle=shuffle, seed=seed
        )
        return DataLoader(dataset, batch_size, sampler=sampler, **options)


def apply(
    model: nn.Module,
    config: SequenceParallelConfig | Mapping[str, Any],
    group: ProcessGroup | None = None,
    table: Mapping[str, AttentionModule] = TABLE,
) -> Applied:
    """Spread the sequences of `model`, before `booster.boost(model, ...)` wraps it.

        applied = wf_colossalai.apply(model, {"sequence_parallel_size": 4, "route": "ring"})
        booster = Booster(plugin=GeminiPlugin(...))
        model, optimizer, *_ = booster.boost(model, optimizer)
        loader = applied.prepare_dataloader(dataset, batch_size=1)

    For TorchDDPPlugin, LowLevelZeroPlugin and GeminiPlugin. They average gradients over the whole
    world, and the model's loss counts on it. Call the boosted model with whole batches.

    Args:
        model: a model whose attention is in `table`. It is changed in place.
        config: the configuration or its words; with "dsp" among them (the words of
            `wf_backends.dsp.stages.Stages`) any model whose modules they name, `table` aside.
        group: the ranks that the plugin averages gradients over. None: the world. It is cut into
            blocks of sequence_parallel_size consecutive ranks.
        table: the attention modules that are known.

    Raises:
        ValueError: for a wrong word, an unknown model, or a size that does not divide the group.
    """
    stages = None
    if not isinstance(config, SequenceParallelConfig):
        config, stages = dsp.read_words(config)
    sp = PlainSequenceParallel(config, own_group() if group is None else group)
    if stages is not None:
        return Applied(connect_stages(model, sp, stages), group)
    return Applied(connect(model, sp, table), group)
