"""What reads models for the commands: functions that other packages register as entry points.

The core imports no framework.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

SHAPES = "wallfacer.model_shapes"  # entry points: (name, whether all sizes) -> sizes of a model


def call_reader(group: str, command: str, *args: Any, **kwargs: Any) -> Any:
    """What the first function of this group that can be imported returns.

    Raises:
        ValueError: where nothing is installed that reads models.
    """
    why = "none is registered: install WallFacer itself, pip install '.[transformers]'"
    for reader in entry_points(group=group):
        try:
            with redirect_stdout(sys.stderr):  # what libraries say when imported is no result
                return reader.load()(*args, **kwargs)
        except ModuleNotFoundError as error:
            why = f"{error}: pip install '.[transformers]'"
    raise ValueError(f"{command} needs what reads models; {why}")


def check_folder(model: Path) -> None:
    """ValueError for a folder without a model's configuration."""
    if not (model / "config.json").exists():
        raise ValueError(f"--model {model}: there is no config.json")


def read_model(name: str, sizes: bool = False) -> dict[str, int]:
    """heads, kv_heads and head_dim of a model; with `sizes` also what its memory follows from.

    Raises:
        ValueError: if there is no such model, its config does not tell its heads, or nothing is
            installed that reads models.
        NotImplementedError: for sizes of a mixture of experts.
    """
    return call_reader(SHAPES, "--model", name, sizes)
