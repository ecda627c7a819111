"""Checkpoints that are complete or not there.

All ranks write into a folder whose name ends in `.part`. When all have finished, rank 0 renames it
and then writes the file `latest`. A job that is killed keeps its earlier checkpoints, and leaves at
most one `.part` folder.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from wf_backends.comm import Communicator, gather_small, make_comm

PART, OLD = ".part", ".old"  # suffixes of folders
LATEST = "latest"  # the file that names the newest checkpoint


@contextmanager
def saved_whole(folder: str | os.PathLike[str], tag: str, latest: bool = True) -> Iterator[Path]:
    """Yields a folder into which every rank writes its part; on leaving it becomes folder/tag.

    Collective: all ranks of the default group must enter and leave together. All ranks must see the
    same `folder`.

    Args:
        latest: whether the file `latest` names this checkpoint from then on.

    Raises:
        RuntimeError: if a rank ends before all have written, naming it.
    """
    comm, whole, part = make_comm(), Path(folder, tag), Path(folder, tag + PART)
    if comm.rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    _wait_for_all(comm)
    yield part
    _wait_for_all(comm)  # all ranks have written
    if comm.rank == 0:
        _put_in_place(part, whole)
        if latest:
            write_whole(Path(folder, LATEST), tag)
    _wait_for_all(comm)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that no reader ever sees a part of it. After an error it is as it was."""
    part = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    try:
        with part.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def find_checkpoint(folder: str | os.PathLike[str], tag: str | None = None) -> Path:
    """The folder of the checkpoint `tag`, or of the one that the file `latest` names.

    Raises:
        ValueError: if it is missing or incomplete; names the newest complete checkpoint.
    """
    folder, latest = Path(folder), Path(folder, LATEST)
    tag = tag or (latest.read_text().strip() if latest.is_file() else "")
    if not tag:
        names = complete(folder)
        problem = f"{folder} has no file {LATEST!r}, or it is empty; {_newest(names)}"
        raise ValueError(problem if names else f"no checkpoint in {folder}")
    path = _whole(folder / tag)
    if problem := _problem(path):
        raise ValueError(f"checkpoint {tag!r} in {folder} {problem}; {_newest(complete(folder))}")
    return path


def complete(folder: Path) -> list[str]:
    """The names of the complete checkpoints in a folder, the oldest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if path.is_dir() and path.suffix != PART]
    paths = [path for path in paths if path == _whole(path.with_name(path.name.removesuffix(OLD)))]
    whole = [path for path in paths if not _problem(path)]
    return [path.name for path in sorted(whole, key=lambda path: path.stat().st_mtime)]


def _whole(checkpoint: Path) -> Path:
    """The folder of a checkpoint: `.old` if the job ended between the two renames."""
    old = checkpoint.with_name(checkpoint.name + OLD)
    return old if old.is_dir() and not checkpoint.exists() else checkpoint


def _newest(names: list[str]) -> str:
    return f"the newest complete one is {names[-1]!r}" if names else "there is no complete one"


def _problem(checkpoint: Path) -> str | None:
    """Why a checkpoint cannot be used; None if it can. A file of torch.save is a zip file."""
    if not checkpoint.is_dir():
        if checkpoint.with_name(checkpoint.name + PART).is_dir():
            return "is incomplete: the job ended while it was written"
        return "is missing"
    cut = [p.name for p in sorted(checkpoint.rglob("*.pt")) if not zipfile.is_zipfile(p)]
    return f"is incomplete: {cut[0]} was cut off" if cut else None


def _put_in_place(part: Path, whole: Path) -> None:
    """Rename `part` to `whole`; an earlier `whole` is renamed to `.old` first, then deleted."""
    old = whole.with_name(whole.name + OLD)
    if whole.exists():
        shutil.rmtree(old, ignore_errors=True)
        whole.rename(old)
    part.rename(whole)
    shutil.rmtree(old, ignore_errors=True)


def _wait_for_all(comm: Communicator) -> None:
    """Return when all ranks have called this. An error names the rank that did not."""
    gather_small(comm, torch.zeros(1), "checkpoint").tolist()
