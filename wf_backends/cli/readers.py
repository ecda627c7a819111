"""What reads models for the commands: functions that other packages register as entry points.

The core imports no framework.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from typer import Option

SHAPES = "wallfacer.model_shapes"  # entry points: (name, whether all sizes) -> sizes of a model


def call_reader(group: str, command: str, *args: Any, **kwargs: Any) -> Any:
    """What the first function of this group that can be imported returns; ValueError if none."""
    why = "none is registered: install WallFacer itself, pip install '.[transformers]'"
    for reader in entry_points(group=group):
        try:
            with redirect_stdout(sys.stderr):  # what libraries say when imported is no result
                return reader.load()(*args, **kwargs)
        except ModuleNotFoundError as error:
            why = f"{error}: pip install '.[transformers]'"
    raise ValueError(f"{command} needs what reads models; {why}")


def check_folder(model: Path) -> Path:
    """The folder; refused, before any framework is loaded, if it has no model's configuration."""
    config = model / "config.json"
    if not model.is_dir():
        raise ValueError(f"--model {model}: there is no such folder")
    if not config.is_file():
        raise ValueError(f"--model {model}: there is no config.json")
    try:
        words = json.loads(config.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--model {model}: config.json is no JSON ({error})") from error
    if not isinstance(words, dict) or "model_type" not in words:
        raise ValueError(
            f'--model {model}: config.json must tell what it is of, as "model_type": "llama"'
        )
    return model


ModelFolder = Annotated[Path, Option(callback=check_folder, help="Folder with a config.json.")]


def read_model(name: str, sizes: bool = False) -> dict[str, Any]:
    """heads, kv_heads and head_dim of a model; with `sizes` also what its memory follows from.

    Raises:
        ValueError, NotImplementedError: if its config does not tell them.
    """
    if Path(name).is_dir():
        check_folder(Path(name))
    return call_reader(SHAPES, "--model", name, sizes)
