"""`--model`: heads and their size of a model that another package can read.

Who can says so by an entry point of the group SHAPES, a function from the model's name to heads,
kv_heads and head_dim, and from (name, True) to its other sizes too: the core imports no framework.
"""

from __future__ import annotations

from typing import Annotated

import typer

from wf_backends.cli.readers import call_reader

SHAPES = "wallfacer.model_shapes"


def take_shape(ctx: typer.Context, name: str) -> str:
    """Put the model's shape in the place of the defaults; what else is said counts more.

    Raises:
        ValueError: if there is no such model, its config does not tell its heads, or nothing is
            installed that reads models.
    """
    if name:
        ctx.default_map = {**(ctx.default_map or {}), **read_model(name)}
    return name


def read_model(name: str, sizes: bool = False) -> dict[str, int]:
    """heads, kv_heads and head_dim of a model; with `sizes` also what its memory follows from.

    Raises:
        ValueError: as `take_shape`.
        NotImplementedError: for sizes of a mixture of experts.
    """
    return call_reader(SHAPES, "--model", name, sizes)


ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        callback=take_shape,
        is_eager=True,
        help="A Hugging Face model, a folder, a config.json or a name: whose heads, key heads and "
        "head size count where they are not given.",
    ),
]
