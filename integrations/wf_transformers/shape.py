"""Heads and their size of a Hugging Face model, for `wallfacer plan --model`."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import AutoConfig


def model_shape(name: str) -> dict[str, int]:
    """heads, kv_heads and head_dim of a model: a folder, its config.json, or a name of the Hub.

    Of a model that also sees, its language model's.

    Raises:
        ValueError: if there is no such model, or its config does not tell its heads.
    """
    try:
        config: Any = AutoConfig.from_pretrained(name).get_text_config()
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {name}: {str(error).splitlines()[0]}") from error
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
