"""`wallfacer verify`: does a model give on several ranks what it gives on one?"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from wf_backends.cli.options import check_least
from wf_backends.parallel import SequenceParallelConfig

VERIFIERS = "wallfacer.verifiers"  # entry points: (folder, config) -> what was found, in a sentence


def verify(
    model: Annotated[Path, typer.Option(help="Folder with config.json; weights are optional.")],
    sequence_parallel_size: Annotated[int, typer.Option(help="Ranks, as threads of a process.")],
    route: Annotated[str, typer.Option(help="ring or all_gather.")] = "ring",
    ulysses_degree: Annotated[int, typer.Option(help="Ranks that trade heads for tokens.")] = 1,
    layout: Annotated[str, typer.Option(help="zigzag or contiguous.")] = "zigzag",
) -> None:
    """Compare a model on several ranks, which are threads, with the same model on one.

    On a short drawn batch, in float32: outputs of all modules, the loss, every gradient. Exit code
    1 where they differ; the first module whose output does is named.

    Example:

        wallfacer verify --model ./llama --sequence-parallel-size 4
    """
    check_least("--sequence-parallel-size", sequence_parallel_size, 2)
    if not (model / "config.json").exists():
        raise ValueError(f"--model {model}: there is no config.json")
    config = SequenceParallelConfig(
        sequence_parallel_size=sequence_parallel_size,
        route=route,
        ulysses_degree=ulysses_degree,
        layout=layout,
    )
    try:
        print(_verify(model, config))
    except NotImplementedError as error:
        typer.echo(f"wallfacer: {error}", err=True)
        raise typer.Exit(1) from error


def _verify(model: Path, config: SequenceParallelConfig) -> str:
    """What the first package that reads models says; the core imports no framework."""
    why = "none is registered: install WallFacer itself, pip install '.[transformers]'"
    for reader in entry_points(group=VERIFIERS):
        try:
            with redirect_stdout(sys.stderr):  # what libraries say when imported
                return reader.load()(model, config)
        except ModuleNotFoundError as error:
            why = f"{error}: pip install '.[transformers]'"
    raise ValueError(f"verify needs what reads models; {why}")
