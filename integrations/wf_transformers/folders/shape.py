"""Heads and other sizes of a Hugging Face model, for `wallfacer plan --model`."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub.constants import ENDPOINT
from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from wf_backends.budget import Experts
from wf_transformers.folders.layers import count_layers

try:
    from transformers.initialization import no_init_weights  # pyright: ignore[reportMissingImports]
except ImportError:  # transformers 4
    from transformers.modeling_utils import no_init_weights

DTYPES = MappingProxyType({2: torch.bfloat16, 4: torch.float32, 8: torch.float64})  # by itemsize
DTYPE = "dtype" if hasattr(PretrainedConfig, "torch_dtype") else "torch_dtype"
"""The name of a dtype in configs and loaders; newer versions warn of the second."""
NUMBER = re.compile("^num_|_(dim|size)$")  # config fields that are numbers where they are set
HUB_S = 3.0  # in which a connection to the Hub opens
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Config fields for the number of experts."""
SHARED_EXPERTS = ("shared_expert_intermediate_size", "shared_intermediate_size")
"""Config fields for the width of the experts that every token goes to."""
INDEXERS = ("index_topk", "index_topk_blocks", "indexer_budget")
"""Config fields for the number of keys that an indexer chooses."""
MLP_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff")
"""Config fields for the width of a layer's MLP, or of an expert."""


def model_shape(name: str, itemsize: int = 0) -> dict[str, Any]:
    """heads, kv_heads and head_dim of a model: a folder, its config.json, or a name of the Hub.

    For a vision-language model, those of its language model. For DeepSeek's multi-head latent
    attention, those of the keys that are computed from the latents, with value_dim. Refused are
    models with an indexer.

    Args:
        itemsize: bytes of a number in training; then all arguments of a `Decoder` are returned.
    """
    config = read_config(name).get_text_config()
    if (field := next((x for x in INDEXERS if getattr(config, x, None)), None)) is not None:
        raise NotImplementedError(
            f'--model {name}: "{field}" in its config: an indexer chooses the keys that layers '
            "see, and such layers take no route; docs/transformers.md says what they run"
        )
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ValueError(
            f"--model {name}: its {type(config).__name__} has no num_attention_heads; give "
            "--heads, --kv-heads and --head-dim instead"
        )
    try:
        shape = {
            "heads": heads,
            "kv_heads": _key_heads(config) or heads,
            "head_dim": _first(config, ("head_dim", "attention_head_dim"))
            or config.hidden_size // heads,
        }
        if nope_dim := getattr(config, "qk_nope_head_dim", None):
            shape["head_dim"] = nope_dim + config.qk_rope_head_dim
            shape["value_dim"] = config.v_head_dim
    except Exception as error:  # transformers 5 has a class for layers that differ (Gemma 4)
        raise ValueError(
            f"--model {name}: {str(error).partition('. ')[0]}; give --heads, --kv-heads and "
            "--head-dim of one kind of layer instead"
        ) from error
    return _sizes(name, config, itemsize) | shape if itemsize else shape


def read_config(name: str | Path) -> Any:
    """The config of a folder, a file, or a name of the Hub."""
    is_local = Path(name).exists() or not _hub_answers()
    with refused_by_name(name):
        return load_config(name, local_files_only=is_local)


def load_config(name: str | Path, **options: Any) -> Any:
    """As transformers loads it, but code beside it is not run.

    Raises:
        ValueError: if it needs such code, or has a word in place of a number.
    """
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.is_file():
        _check_numbers(json.loads(path.read_text()))
    return AutoConfig.from_pretrained(name, trust_remote_code=False, **options)


def _check_numbers(values: dict[str, Any]) -> None:
    """Refuse words where the model's default config has numbers, also in parts of the config."""
    try:
        defaults: dict[str, Any] = vars(CONFIG_MAPPING[values["model_type"]]())
    except Exception:  # a part may name no model, and some classes need arguments
        defaults = {}
    for key, value in values.items():
        default = defaults.get(key)
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        if isinstance(value, str) and (is_number or NUMBER.search(key)):
            raise ValueError(f'"{key}" in config.json must be a number, got {value!r}')
        if isinstance(value, dict):
            _check_numbers(value)


def _hub_answers() -> bool:
    """Whether the Hub can be reached: its own client tries again and again for half a minute."""
    hub = urlsplit(ENDPOINT)
    if getproxies():  # a proxy may reach what this machine does not
        return True
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=HUB_S).close()
    except OSError:
        return False
    return True


@contextmanager
def refused_by_name(name: str | Path, advice: str = "") -> Iterator[None]:
    """Turn what transformers raises for a model's files into a ValueError of one line with `name`,
    and with `advice` behind it.

    transformers does not check the values of a config: a wrong value may raise any error.
    """
    try:
        yield
    except ModuleNotFoundError:
        raise
    except Exception as error:
        prefix = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        if "trust_remote_code" in str(error):
            error = ValueError(
                'it has code of its own ("auto_map"), which only a script of yours may run: load '
                "it there with trust_remote_code=True, then call wf_transformers.attach"
            )
        if not Path(name).exists():
            prefix = "there is no such folder, and as a name on the Hub: "
        joined = re.sub(r":\n\s+", ": ", str(error).strip())  # a validator's error, and its cause
        first_line = joined.partition("\n")[0]
        raise ValueError(f"--model {name}: {prefix}{first_line}{advice}") from error


def has_causal_model(config: Any) -> bool:
    """Whether transformers has a causal language model for it."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def _sizes(name: str, config: Any, itemsize: int) -> dict[str, Any]:
    """The sizes that memory depends on; parameters are counted on torch's device meta."""
    if config.is_encoder_decoder or not has_causal_model(config):
        what = "has an encoder, too" if config.is_encoder_decoder else "is of no language model"
        raise NotImplementedError(
            f"--model {name}: the memory budget counts decoders, and {type(config).__name__} "
            f"{what}; leave --memory-gib out"
        )
    hidden = config.hidden_size
    mlp = {"intermediate": _first(config, MLP_WIDTHS) or 4 * hidden}
    experts = _experts(name, config)
    with refused_by_name(name), torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, **{DTYPE: DTYPES[itemsize]})
        model.tie_weights()
    return {
        "layers": config.num_hidden_layers,
        "hidden": hidden,
        "vocabulary": config.vocab_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "itemsize": itemsize,
        "value_dim": None,
        "is_capped": bool(getattr(config, "final_logit_softcapping", None)),
        **(experts or mlp),
        **count_layers(model),  # which leaves some of the layers
    }


def _key_heads(config: Any) -> int | None:
    """The key heads that attention is called with; None = as many as heads."""
    if getattr(config, "new_decoder_architecture", False):  # Falcon repeats key heads itself here
        return None
    return 1 if getattr(config, "multi_query", False) else _first(config, ("num_key_value_heads",))


def _first(config: Any, fields: Iterable[str]) -> Any:
    """The first value of these fields that is there and not 0; else None."""
    values = (getattr(config, field, None) for field in fields)
    return next((value for value in values if value), None)


def _experts(name: str, config: Any) -> dict[str, Any] | None:
    """The experts of a mixture's layers, and the width of its shared expert; None without any."""
    config = getattr(config, "ffn_config", config)  # DBRX
    count = _first(config, EXPERTS)
    if count is None:
        return None
    top_k = _first(config, ("num_experts_per_tok", "moe_top_k"))
    width = _first(config, ("moe_intermediate_size", *MLP_WIDTHS))
    if not isinstance(count, int) or not isinstance(top_k, int) or not isinstance(width, int):
        raise NotImplementedError(
            f"--model {name}: the memory budget does not know how many experts a token of "
            f"{type(config).__name__} goes to; leave --memory-gib out"
        )
    shared = _first(config, SHARED_EXPERTS) or (_first(config, ("n_shared_experts",)) or 0) * width
    return {"intermediate": shared, "experts": Experts(count, top_k, width)}
