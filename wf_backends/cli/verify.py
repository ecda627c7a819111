"""`wallfacer verify`: does a model give on several ranks what it gives on one?"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from typer import Option

from wf_backends._validation import one_of
from wf_backends.cli.options import check_range
from wf_backends.cli.readers import ModelFolder, call_reader
from wf_backends.parallel import SequenceParallelConfig

MOST_THREADS = 256
LAYOUTS = ("zigzag", "contiguous")  # of any batch; others follow from documents or a mask
VERIFIERS = "wallfacer.verifiers"  # entry points: (folder, config) -> what was found, in a sentence


def verify(
    model: ModelFolder,
    sequence_parallel_size: Annotated[int, Option(help="Ranks, as threads of a process.")],
    route: Annotated[str, Option(help="ring or all_gather.")] = "ring",
    ulysses_degree: Annotated[int, Option(help="Ranks that trade heads for tokens.")] = 1,
    layout: Annotated[str, Option(help="zigzag or contiguous.")] = "zigzag",
) -> None:
    """Compare a model on several ranks, which are threads, with the same model on one.

    On a short drawn batch, in float32: outputs of all modules, the loss, every gradient. Exit code
    1 where they differ; the first module whose output does is named. Weights are drawn where the
    folder has none.

    Example:

        wallfacer verify --model ./llama --sequence-parallel-size 4
    """
    check_range(2, MOST_THREADS, sequence_parallel_size=sequence_parallel_size)
    one_of("--layout", layout, LAYOUTS)
    config = SequenceParallelConfig(
        sequence_parallel_size=sequence_parallel_size,
        route=route,
        ulysses_degree=ulysses_degree,
        layout=layout,
    )
    try:
        print(call_reader(VERIFIERS, "verify", model, config))
    except NotImplementedError as error:
        print(f"wallfacer: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
