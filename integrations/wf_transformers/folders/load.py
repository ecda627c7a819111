"""Loads models from a folder, with their weights memory-mapped from its safetensors files."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from wf_transformers.folders.shape import refused_by_name


def model_from_folder(
    folder: str | Path, torch_dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A causal language model whose weights are memory-mapped from files.

    The system reads pages when they are used and may drop them again, so host memory holds no
    second copy of the weights. Weights of another dtype than the model's are read and converted.
    Weights that transformers 5 merges or renames on loading, such as experts, are read.

    Args:
        folder: written by `save_pretrained`, with safetensors; or one of the Hub in this form.
        torch_dtype: of the model. None: that of the config; if it has none, that of the files, and
            if these have several, the one with the most bytes.

    Raises:
        ValueError: if safetensors files are missing, or weights are quantized, or tensors have
            other names or shapes than the model's parameters.
    """
    from accelerate import init_empty_weights

    if not isinstance(torch_dtype, torch.dtype | None):
        raise ValueError(
            f"torch_dtype must be such as torch.bfloat16, or None, got {torch_dtype!r}"
        )
    files = _weight_files(Path(folder))
    config = AutoConfig.from_pretrained(folder)
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        raise ValueError(f"{folder} holds quantized weights, which are not split: {quantized}")
    dtype = config.torch_dtype if torch_dtype is None else torch_dtype
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype)
    if _has_weight_conversions(model):
        return _converted_model(folder, dtype).eval()
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _mapped_tensors(file)
    _load_weights(model, _of_dtype(_named_as_in(model, tensors), dtype), folder)
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _has_weight_conversions(model: PreTrainedModel) -> bool:
    """Whether transformers 5 converts the tensors of files for this model."""
    try:
        from transformers.conversion_mapping import (  # pyright: ignore[reportMissingImports]
            get_model_conversion_mapping,
        )
    except ImportError:  # transformers 4
        return False
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def _converted_model(folder: str | Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model as transformers loads it; ValueError if any weights are missing or unknown."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True
        )
    except RuntimeError as error:
        raise ValueError(f"{folder} does not hold what its config says: {error}") from error
    _check_names(model, info["missing_keys"], info["unexpected_keys"], folder)
    return model


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read; the folder may have others from earlier saves."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (single := folder / SAFE_WEIGHTS_NAME).exists():
        return [single]
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(
                f"{folder} has no *.safetensors files: write them with "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        return files
    names = sorted({*json.loads(index.read_text()).get("weight_map", {}).values()})
    if not names:
        raise ValueError(f'{index} names no files: it must have a "weight_map"')
    if missing := [name for name in names if not (folder / name).exists()]:
        raise ValueError(f"{folder} lacks {missing}, which {index.name} names")
    return [folder / name for name in names]


def _mapped_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name."""
    try:
        with safe_open(file, framework="pt") as reader:
            return {name: reader.get_tensor(name) for name in reader.keys()}
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _of_dtype(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors, those of floating point converted to `dtype`; None: to their main dtype."""
    sizes = Counter[torch.dtype]()
    for tensor in tensors.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.nbytes
    if dtype is None and sizes:
        dtype = sizes.most_common(1)[0][0]
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}


def _named_as_in(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the model's names, as transformers would find them in files of the Hub.

    Those of a base model have names without its prefix (GPT-2, Bloom). Old ones also hold buffers
    that the model computes (masks of GPT-2, rotary frequencies of Llama 2), which are left out.
    """
    weights = model.state_dict().keys()
    buffers = {name for name, _ in model.named_buffers()}
    prefix = f"{model.base_model_prefix}."
    if not any(name.startswith(prefix) for name in tensors):
        names = {name.removeprefix(prefix): name for name in weights | buffers}
        tensors = {names.get(name, name): tensor for name, tensor in tensors.items()}
    patterns: list[str] = [*(model._keys_to_ignore_on_load_unexpected or ())]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    ignored = {name for name in tensors if any(re.search(pattern, name) for pattern in patterns)}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in weights or name not in buffers | ignored
    }


def _load_weights(model: PreTrainedModel, tensors: dict[str, Tensor], folder: str | Path) -> None:
    """Load the weights into the model; ValueError if any are missing or unknown."""
    try:
        unknown = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    except RuntimeError as error:  # for wrong shapes, one line each after the first
        reason = str(error).splitlines()[1].strip()
        raise ValueError(f"{folder} does not hold what its config says: {reason}") from error
    model.tie_weights()
    missing = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    _check_names(model, missing, unknown, folder)


def _check_names(
    model: PreTrainedModel, missing: Iterable[str], unknown: Iterable[str], folder: str | Path
) -> None:
    missing, unknown = sorted(missing), sorted(unknown)
    if missing or unknown:
        raise ValueError(
            f"{folder} does not hold a {type(model).__name__} as save_pretrained writes it: "
            f"missing {missing[:3]}, unknown {unknown[:3]}"
        )


@dataclass(frozen=True, slots=True)
class Generator:
    """A model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any

    def generate_text(
        self,
        prompt: str,
        max_new_tokens: int,
        write: Callable[[str], None],
        seed: int | None,
        on_host: bool,
    ) -> None:
        """Call `write` with the text of each new token, in order.

        Args:
            seed: for sampling. None: greedy decoding.
            on_host: whether the model's inputs are on the host, not on torch's accelerator.

        Raises:
            ValueError: for a prompt without tokens.
        """
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        if not ids.numel():
            raise ValueError(f"the prompt must have a token at least, got {prompt!r}")
        if not on_host:
            ids = ids.to(torch.accelerator.current_accelerator())
        if seed is not None:
            torch.manual_seed(seed)
        self.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=seed is not None,
            streamer=_Writer(self.tokenizer, write),
            pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0,
        )


class _Writer(BaseStreamer):
    """Writes what each token adds to the text."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.ids: list[int] | None = None
        self.text = ""

    def put(self, value: Tensor) -> None:
        if self.ids is None:  # the prompt
            self.ids = []
            return
        self.ids += value.flatten().tolist()
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        # U+FFFD: the next tokens complete this character.
        added = "" if text.endswith("\ufffd") else text[len(self.text) :]
        self.text += added
        self.write(added)

    def end(self) -> None:
        pass


def generator(folder: Path) -> Generator:
    """The model and tokenizer for `wallfacer generate`."""
    with refused_by_name(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder)  # first, because it fails sooner
        return Generator(model_from_folder(folder), tokenizer)
