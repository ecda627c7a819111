"""`wallfacer verify`: does a model give on several ranks what it gives on one?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wf_backends.cli.options import check_range
from wf_backends.cli.readers import call_reader, check_folder
from wf_backends.parallel import SequenceParallelConfig

MOST_THREADS = 256
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
    check_range(2, MOST_THREADS, sequence_parallel_size=sequence_parallel_size)
    check_folder(model)
    config = SequenceParallelConfig(
        sequence_parallel_size=sequence_parallel_size,
        route=route,
        ulysses_degree=ulysses_degree,
        layout=layout,
    )
    try:
        print(call_reader(VERIFIERS, "verify", model, config))
    except NotImplementedError as error:
        typer.echo(f"wallfacer: {error}", err=True)
        raise typer.Exit(1) from error
