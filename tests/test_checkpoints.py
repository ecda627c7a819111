"""A checkpoint is complete or absent, whenever the job that writes it is killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wf_backends.checkpoints import complete, find_checkpoint, saved_whole, write_whole
from wf_backends.cluster import save_text

NUM_RANKS, FILES_PER_RANK = 2, 4


def save_until_killed(folder: Path, rank: int) -> None:
    """A rank that saves one checkpoint after another; a value in a checkpoint is its step."""
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    for step in count(1):
        with saved_whole(folder / "kept", f"step{step % 3}") as part:
            for index in range(FILES_PER_RANK):
                torch.save(torch.full((1000,), step), part / f"rank{rank} {index}.pt")
                time.sleep(random.random() * 2e-3)


@pytest.mark.processes
def test_a_job_killed_while_it_saves_leaves_complete_checkpoints(tmp_path: Path) -> None:
    """20 jobs are killed at drawn moments, half of them after a first checkpoint: a drawn rank
    first, then the other."""
    context, draw = multiprocessing.get_context("fork"), random.Random(0)
    num_resumable = 0
    for trial in range(20):
        folder = tmp_path / str(trial)
        folder.mkdir()
        ranks: list[Any] = [
            context.Process(target=save_until_killed, args=(folder, rank))
            for rank in range(NUM_RANKS)
        ]
        for rank in ranks:
            rank.start()
        end = time.monotonic() + 30
        started = folder / "kept" / ("latest" if trial % 2 else "")
        while not started.exists() and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.1)
        for rank in draw.sample(ranks, NUM_RANKS):
            os.kill(rank.pid, signal.SIGKILL)
            rank.join()
        assert_complete(folder / "kept")
        num_resumable += (folder / "kept" / "latest").exists()
    assert num_resumable >= 10


def save_beside_a_killed_rank(folder: Path, rank: int, errors: Any) -> None:
    """Rank 1 is killed while it saves; rank 0 sends the error that it gets."""
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    try:
        with saved_whole(folder, "step1"):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except RuntimeError as error:
        errors.send(str(error))


@pytest.mark.processes
def test_a_rank_that_is_killed_while_it_saves_is_named(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    received, errors = context.Pipe(duplex=False)
    for rank in range(NUM_RANKS):
        arguments = (tmp_path, rank, errors)
        context.Process(target=save_beside_a_killed_rank, args=arguments, daemon=True).start()
    assert received.poll(30), "rank 0 waits"
    error = received.recv()
    assert re.match(r"rank 0 of 2: 'checkpoint', the message (to|from) rank 1 failed", error)


def assert_complete(folder: Path) -> None:
    """Every checkpoint has all files, of one step; `latest` names one of the checkpoints."""
    names = complete(folder)
    for name in names:
        steps = [torch.load(path)[0].item() for path in (folder / name).glob("*.pt")]
        assert len(steps) == NUM_RANKS * FILES_PER_RANK and len(set(steps)) == 1, (name, steps)
    folders = {path.stem for path in folder.iterdir() if path.is_dir() and path.suffix != ".part"}
    assert {Path(name).stem for name in names} == folders
    if (folder / "latest").exists():
        assert find_checkpoint(folder).name in names


def save(folder: Path, tag: str) -> None:
    with saved_whole(folder, tag) as part:
        torch.save(torch.zeros(100), part / "a.pt")


def test_an_incomplete_checkpoint_is_refused_with_the_newest_complete_one(tmp_path: Path):
    with pytest.raises(ValueError, match="no checkpoint in"):
        find_checkpoint(tmp_path)
    save(tmp_path, "step2")
    assert find_checkpoint(tmp_path).name == find_checkpoint(tmp_path, "step2").name == "step2"
    with pytest.raises(RuntimeError, match="a fault"), saved_whole(tmp_path, "step4"):
        raise RuntimeError("a fault")
    assert find_checkpoint(tmp_path).name == "step2"
    offer = "the newest complete one is 'step2'"
    with pytest.raises(ValueError, match=f"'step4' in .* is incomplete: the job ended .*; {offer}"):
        find_checkpoint(tmp_path, "step4")
    with pytest.raises(ValueError, match=f"'step5' in .* is missing; {offer}"):
        find_checkpoint(tmp_path, "step5")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    """Another program may write in place, and name an incomplete checkpoint in `latest`."""
    save(tmp_path, "step2")
    save(tmp_path, "step4")
    file = tmp_path / "step4" / "a.pt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="a.pt was cut off; the newest complete one is 'step2'"):
        find_checkpoint(tmp_path)


def test_a_job_killed_while_it_renames_leaves_the_earlier_checkpoint_of_that_name(tmp_path: Path):
    save(tmp_path, "last")
    (tmp_path / "last").rename(tmp_path / "last.old")
    (tmp_path / "last.part").mkdir()
    assert complete(tmp_path) == ["last.old"]
    assert find_checkpoint(tmp_path).name == find_checkpoint(tmp_path, "last").name == "last.old"
    save(tmp_path, "last")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "latest"]


def test_an_empty_file_latest_names_no_checkpoint(tmp_path: Path) -> None:
    """Another program was killed, or met a full disk, while it wrote the file."""
    save(tmp_path, "step2")
    (tmp_path / "latest").write_text("")
    with pytest.raises(ValueError, match="or it is empty; the newest complete one is 'step2'"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("write", [write_whole, save_text])
def test_a_file_that_a_full_disk_cuts_off_is_as_it_was(
    write: Callable[[Path, str], object], tmp_path: Path
) -> None:
    path = tmp_path / "latest"
    path.write_text("step2")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # a write fails, as on a full disk
    try:
        with suppress(OSError):
            write(path, "step4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "step2" and [*tmp_path.iterdir()] == [path]


def test_a_checkpoint_can_be_overwritten(tmp_path: Path) -> None:
    save(tmp_path, "step2")
    save(tmp_path, "step2")
    write_whole(tmp_path / "latest", "step2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step2"]
