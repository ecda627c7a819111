"""`wallfacer verify`: compares a model on several ranks with the same model on one."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer import Option

from wf_backends._validation import one_of
from wf_backends.cli.options import check_range
from wf_backends.cli.readers import ModelFolder, call_reader
from wf_backends.parallel import SequenceParallelConfig

MAX_THREADS = 256
VERIFIERS = "wallfacer.verifiers"  # entry points: (folder, config, layers) -> a sentence


def verify(
    model: ModelFolder,
    sequence_parallel_size: Annotated[int, Option(help="Ranks, as threads of one process.")],
    route: Annotated[str, Option(help="ring or all_gather.")] = "ring",
    ulysses_degree: Annotated[int, Option(help="Ranks that exchange heads for tokens.")] = 1,
    layout: Annotated[str, Option(help="zigzag or contiguous.")] = "zigzag",
    layers: Annotated[int, Option(help="Take the first so many layers; 0: all.")] = 0,
) -> None:
    """Compare a model on several ranks, which are threads, with the same model on one.

    Outputs of all modules, the loss and every gradient are compared on a short random batch in
    float32. If they differ, the exit code is 1 and the first module with a different output is
    named. Weights are random if the folder has none.

    Example:

        wallfacer verify --model ./llama --sequence-parallel-size 4 --layers 2
    """
    check_range(2, MAX_THREADS, sequence_parallel_size=sequence_parallel_size)
    check_range(0, layers=layers)
    one_of("--layout", layout, ("zigzag", "contiguous"))  # others need documents or a mask
    options: dict[str, Any] = {"route": route, "ulysses_degree": ulysses_degree, "layout": layout}
    config = SequenceParallelConfig(sequence_parallel_size=sequence_parallel_size, **options)
    try:
        print(call_reader(VERIFIERS, "verify", model, config, layers))
    except NotImplementedError as error:
        print(f"wallfacer: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
