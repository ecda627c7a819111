"""`--model`: heads and their size out of a Hugging Face model's config."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def take_shape(ctx: typer.Context, name: str) -> str:
    """Put the model's shape in the place of the defaults; what else is said counts more.

    Raises:
        ValueError: if there is no such model, or its config does not tell its heads.
    """
    if name:
        ctx.default_map = {**(ctx.default_map or {}), **model_shape(name)}
    return name


def model_shape(name: str) -> dict[str, int]:
    """heads, kv_heads and head_dim of a model: a folder, its config.json, or a name of the Hub.

    Raises:
        ValueError: as `take_shape`.
    """
    config = read_config(name)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ValueError(
            f"--model {name}: its {type(config).__name__} tells no num_attention_heads; say "
            "--heads, --kv-heads and --head-dim instead"
        )
    return {
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def read_config(name: str) -> Any:
    """The transformers config of a model; of one that also sees, its language model's."""
    try:
        from transformers.models.auto.configuration_auto import AutoConfig
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--model needs transformers ({error}): pip install 'wallfacer[transformers]'"
        ) from error
    try:
        return AutoConfig.from_pretrained(name).get_text_config()
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {name}: {str(error).splitlines()[0]}") from error


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
