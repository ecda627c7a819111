"""Reads models through entry points of other packages, since the core imports no framework."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from typer import Option

SHAPES = "wallfacer.model_shapes"  # entry points: (name, itemsize or 0) -> sizes of a model


def call_reader(group: str, command: str, *args: Any) -> Any:
    """Call the first function of the group that can be imported; ValueError if there is none."""
    reason = "none is registered: install WallFacer itself, pip install '.[transformers]'"
    for reader in entry_points(group=group):
        try:
            with redirect_stdout(sys.stderr):  # imports may print to stdout
                return reader.load()(*args)
        except ModuleNotFoundError as error:
            reason = f"{error}: pip install '.[transformers]'"
    raise ValueError(f"{command} needs the packages that read models; {reason}")


def check_folder(model: Path) -> Path:
    """The folder; refuses, before any framework is loaded, a folder without a model's config."""
    if not model.is_dir():
        raise ValueError(f"--model {model}: there is no such folder")
    check_config(model)
    return model


def check_config(model: Path) -> None:
    """Refuse a folder without a model's config, and a file that is none.

    transformers takes a file that names no model for one of the kind that its path names.
    """
    config = model / "config.json" if model.is_dir() else model
    if not config.is_file():
        raise ValueError(f"--model {model}: there is no config.json")
    try:
        content = json.loads(config.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--model {model}: {config.name} is no JSON ({error})") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError(
            f'--model {model}: {config.name} must name the model, as "model_type": "llama"'
        )


ModelFolder = Annotated[Path, Option(callback=check_folder, help="Folder with a config.json.")]


def read_model(name: str, itemsize: int = 0) -> dict[str, Any]:
    """heads, kv_heads and head_dim of a model; with `itemsize` all that its memory depends on.

    Raises:
        ValueError, NotImplementedError: if its config does not have them.
    """
    if Path(name).exists():
        check_config(Path(name))
    return call_reader(SHAPES, "--model", name, itemsize)
