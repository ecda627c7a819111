"""Checkpoints that are complete or not there.

All ranks write into a folder beside, which is renamed when all have ended; `latest` comes after it.
A job that is killed leaves the checkpoints it had, and at most a folder whose name ends in `.part`.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

PART, OLD, LATEST = ".part", ".old", "latest"


@contextmanager
def saved_whole(folder: str | os.PathLike[str], tag: str, latest: bool = True) -> Iterator[Path]:
    """Where every rank writes its part of a checkpoint; on leaving it is there as folder/tag.

    Collective: enters and leaves together on all ranks of the default group. The folder is one
    that all ranks see.

    Args:
        latest: whether `latest` names it from then on.
    """
    whole, part = Path(folder, tag), Path(folder, tag + PART)
    if _is_first():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    _meet()
    yield part
    _meet()  # all ranks have written
    if _is_first():
        _put_in_place(part, whole)
        if latest:
            write_whole(Path(folder, LATEST), tag)
    _meet()


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never there in part."""
    beside = path.with_name(path.name + PART)
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def find_checkpoint(folder: str | os.PathLike[str], tag: str | None = None) -> Path:
    """A complete checkpoint: the one that is named, or that `latest` names.

    Raises:
        ValueError: if there is none, or it is incomplete; names the newest complete one.
    """
    folder = Path(folder)
    named = tag or _read(folder / LATEST)
    if named is None and not (choices := complete(folder)):
        raise ValueError(f"no checkpoint in {folder}")
    if named is None:
        raise ValueError(f"{folder} has no file {LATEST!r}; {_offer(choices)}")
    if problem := _problem(folder / named):
        raise ValueError(f"checkpoint {named!r} in {folder} {problem}; {_offer(complete(folder))}")
    return folder / named


def complete(folder: Path) -> list[str]:
    """The names of the complete checkpoints in a folder, the oldest first."""
    found = [one for one in folder.iterdir() if one.is_dir()] if folder.is_dir() else []
    whole = [one for one in found if one.suffix not in (PART, OLD) and not _problem(one)]
    return [one.name for one in sorted(whole, key=lambda one: one.stat().st_mtime)]


def _offer(names: list[str]) -> str:
    return f"the newest complete one is {names[-1]!r}" if names else "there is no complete one"


def _problem(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; a file of torch.save that was cut off lacks its end."""
    if not checkpoint.is_dir():
        part = checkpoint.with_name(checkpoint.name + PART)
        return (
            "is incomplete: the job ended while it was written" if part.is_dir() else "is missing"
        )
    cut = [p.name for p in sorted(checkpoint.rglob("*.pt")) if not zipfile.is_zipfile(p)]
    return f"is incomplete: {cut[0]} was cut off" if cut else None


def _put_in_place(part: Path, whole: Path) -> None:
    """Rename; a checkpoint of that name makes way, and is there as `.old` for that moment."""
    old = whole.with_name(whole.name + OLD)
    shutil.rmtree(old, ignore_errors=True)
    if whole.exists():
        whole.rename(old)
    part.rename(whole)
    shutil.rmtree(old, ignore_errors=True)


def _read(path: Path) -> str | None:
    return path.read_text().strip() if path.is_file() else None


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()
