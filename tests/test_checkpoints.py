"""Checkpoints are complete or not there, whenever the job that writes them is killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wf_backends.checkpoints import complete, find_checkpoint, saved_whole, write_whole

RANKS, PIECES = 2, 4


def write_for_ever(folder: Path, rank: int) -> None:
    """A rank that saves one checkpoint after another, slowly."""
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    step = 0
    while True:
        step += 1
        with saved_whole(folder / "kept", f"step{step % 3}") as part:
            for piece in range(PIECES):
                torch.save(torch.full((1000,), step), part / f"rank{rank} {piece}.pt")
                time.sleep(random.random() * 2e-3)


@pytest.mark.processes
def test_kills_at_drawn_moments_of_saving(tmp_path: Path) -> None:
    """20 jobs, each killed at a drawn moment: on any rank first, the other one soon after."""
    context, draw = multiprocessing.get_context("fork"), random.Random(0)
    found = 0
    for trial in range(20):
        folder = tmp_path / str(trial)
        folder.mkdir()
        ranks: list[Any] = [
            context.Process(target=write_for_ever, args=(folder, rank)) for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        end = time.monotonic() + 30
        while not (folder / "kept").exists() and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.1)
        for rank in draw.sample(ranks, RANKS):
            os.kill(rank.pid, signal.SIGKILL)
            rank.join()
        found += assert_whole(folder / "kept")
    assert found > 5  # jobs that had a checkpoint


def assert_whole(folder: Path) -> bool:
    """What is there is complete and of one step; `latest` names such a one."""
    for name in complete(folder):
        steps = [torch.load(path)[0].item() for path in (folder / name).glob("*.pt")]
        assert len(steps) == RANKS * PIECES and len(set(steps)) == 1, (name, steps)
    assert len(complete(folder)) == sum(one.is_dir() and not one.suffix for one in folder.iterdir())
    if not (folder / "latest").exists():
        return False
    named = (folder / "latest").read_text()
    assert named in complete(folder) or (folder / f"{named}.old").is_dir()
    return True


def save(folder: Path, tag: str) -> None:
    with saved_whole(folder, tag) as part:
        torch.save(torch.zeros(100), part / "a.pt")


def test_an_incomplete_checkpoint_is_named_and_the_newest_complete_one_offered(tmp_path: Path):
    with pytest.raises(ValueError, match="no checkpoint in"):
        find_checkpoint(tmp_path)
    save(tmp_path, "step2")
    assert find_checkpoint(tmp_path).name == find_checkpoint(tmp_path, "step2").name == "step2"
    with pytest.raises(RuntimeError, match="a fault"), saved_whole(tmp_path, "step4"):
        raise RuntimeError("a fault while it is written")
    assert find_checkpoint(tmp_path).name == "step2"
    offer = "the newest complete one is 'step2'"
    with pytest.raises(ValueError, match=f"'step4' in .* is incomplete: the job ended .*; {offer}"):
        find_checkpoint(tmp_path, "step4")
    with pytest.raises(ValueError, match=f"'step5' in .* is missing; {offer}"):
        find_checkpoint(tmp_path, "step5")


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    """As another program leaves it, which writes in place and names it in `latest`."""
    save(tmp_path, "step2")
    save(tmp_path, "step4")
    file = tmp_path / "step4" / "a.pt"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="a.pt was cut off; the newest complete one is 'step2'"):
        find_checkpoint(tmp_path)


def test_a_checkpoint_may_be_written_again(tmp_path: Path) -> None:
    save(tmp_path, "step2")
    save(tmp_path, "step2")
    write_whole(tmp_path / "latest", "step2")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["latest", "step2"]
