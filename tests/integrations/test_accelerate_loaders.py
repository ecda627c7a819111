"""Loaders and schedulers of a connected Accelerator count groups of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import accelerate.accelerator  # noqa: E402
import accelerate.scheduler  # noqa: E402
from accelerate import Accelerator  # noqa: E402

import wf_accelerate  # noqa: E402
from tests.integrations.deepspeed_jobs import tiny_llama  # noqa: E402
from wf_transformers.whole_batches.by_group import FUNCTIONS  # noqa: E402


def test_batches_that_rank_0_dispatches_are_refused() -> None:
    loader = torch.utils.data.DataLoader(list(range(4)))
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config.dispatch_batches = True
    with wf_accelerate.counted_by_group(accelerator, lambda: 2):
        with pytest.raises(NotImplementedError, match="dispatch_batches=True"):
            accelerator.prepare(loader)


def test_an_accelerator_that_does_not_count_the_ranks_of_a_sequence_is_refused() -> None:
    """accelerate counts one process under DeepSpeed on a CPU: groups would have 1 // 2 parts."""
    loader = torch.utils.data.DataLoader(list(range(4)))
    accelerator = Accelerator(cpu=True)
    with wf_accelerate.counted_by_group(accelerator, lambda: 2):
        with pytest.raises(ValueError, match=r"counts 1 processes.* 2 ranks.*PartialState"):
            accelerator.prepare(loader)


def test_the_loaders_of_two_connected_models_count_a_group_once() -> None:
    accelerator, loader = Accelerator(cpu=True), torch.utils.data.DataLoader(list(range(4)))
    with (
        patch.object(Accelerator, "num_processes", 4),
        patch.object(Accelerator, "process_index", 3),
        patch.object(accelerate.accelerator, "prepare_data_loader") as prepare,
        wf_accelerate.counted_by_group(accelerator, lambda: 2),
        wf_accelerate.counted_by_group(accelerator, lambda: 2),
    ):
        accelerator.prepare_data_loader(loader)
        with pytest.raises(ValueError, match="size 4 beside 2"):
            with wf_accelerate.counted_by_group(accelerator, lambda: 4):
                pass
    options = prepare.call_args.kwargs
    assert (options["num_processes"], options["process_index"]) == (2, 1)


class Numbers(torch.utils.data.IterableDataset):
    """13 samples, without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(13))


@pytest.mark.parametrize("streamed", [False, True])
def test_groups_divide_the_last_samples_of_a_stream_evenly(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As processes do for which accelerate's rank 0 dispatches batches, its default. Files are not
    divided, since groups would make unequal numbers of steps."""
    if streamed:
        datasets = pytest.importorskip("datasets", reason="datasets is not installed")
        numbers = datasets.Dataset.from_dict({"x": range(13)}).to_iterable_dataset(num_shards=2)
    else:
        numbers = Numbers()
    monkeypatch.setattr(Accelerator, "num_processes", 4)
    batches = []
    for rank in range(4):
        monkeypatch.setattr(Accelerator, "process_index", rank)
        accelerator = Accelerator(cpu=True)
        with wf_accelerate.counted_by_group(accelerator, lambda: 2):
            loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(numbers, 2))
        rows = [batch["x"] if streamed else batch for batch in loader]
        batches.append([batch.tolist() for batch in rows])
    first, second = [[0, 1], [4, 5], [8, 9], [12]], [[2, 3], [6, 7], [10, 11], [0]]
    assert batches == [first, first, second, second]


def test_every_sample_is_read_under_a_parallelism_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate makes a mesh of its sizes, of all ranks if it has none, and counts its ranks."""
    mesh = MagicMock(mesh_dim_names=("dp_replicate", "dp_shard"))
    mesh["dp_shard"].size.return_value = 2
    monkeypatch.setattr(Accelerator, "torch_device_mesh", mesh)
    monkeypatch.setattr(Accelerator, "num_processes", 4)
    batches = []
    for rank in range(4):
        monkeypatch.setattr(Accelerator, "process_index", rank)
        accelerator = Accelerator(cpu=True)
        with wf_accelerate.counted_by_group(accelerator, lambda: 2):
            loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(list(range(8))))
        batches.append([batch.item() for batch in loader])
    assert batches == [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]] * 2


def test_a_loader_of_an_earlier_accelerate_gets_no_argument_that_it_does_not_know() -> None:
    """Before its tensor parallelism accelerate had no `torch_device_mesh`."""

    def prepare(
        loader: Any, *, num_processes: int, process_index: int, dispatch_batches: Any
    ) -> Any:
        return num_processes, process_index, dispatch_batches

    by_rank = {"num_processes": 4, "process_index": 3, "dispatch_batches": None}
    functions = FUNCTIONS["prepare_data_loader"]
    loader = torch.utils.data.DataLoader(list(range(4)), shuffle=True)
    assert functions["prepare_data_loader"](2, prepare, loader, **by_rank) == (2, 1, False)


def test_two_models_may_be_removed_in_any_order() -> None:
    """The loaders of the model that is left still count groups; at last nothing is replaced."""
    accelerator, config = Accelerator(cpu=True), {"sequence_parallel_size": 1, "verify": False}
    before = dict(vars(accelerator))
    first, second = (wf_accelerate.connect(tiny_llama(), accelerator, config) for _ in range(2))
    first.remove()
    assert "prepare_data_loader" in vars(accelerator)
    second.remove()
    assert vars(accelerator) == before


def test_a_prepared_scheduler_makes_a_step_for_each_group() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(tiny_llama().parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step))
    with wf_accelerate.counted_by_group(accelerator, lambda: 2):
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    with patch.object(accelerate.scheduler, "AcceleratorState") as state:
        state.return_value.num_processes = 4
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [2.0]
