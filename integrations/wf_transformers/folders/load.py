"""Loads models from a folder, with their weights memory-mapped from its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    Weights that transformers 5 merges on loading, such as experts, are read.

    Args:
        folder: written by `save_pretrained`, with safetensors.
        torch_dtype: of the model. None: that of the config, or of the files if the config has none.

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
    if _weight_conversions(config.model_type):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype)
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _mapped_tensors(file, dtype)
    _load_weights(model, tensors, folder)
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _weight_conversions(model_type: str) -> Any:
    """How transformers 5 converts the tensors of files for this model type, if it does."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:  # transformers 4
        return None
    return get_checkpoint_conversion_mapping(model_type)


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read; the folder may have others from earlier saves."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (single := folder / SAFE_WEIGHTS_NAME).exists():
        return [single]
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{folder} has no *.safetensors files")
        return files
    names = sorted({*json.loads(index.read_text()).get("weight_map", {}).values()})
    if not names:
        raise ValueError(f'{index} names no files: it must have a "weight_map"')
    if missing := [name for name in names if not (folder / name).exists()]:
        raise ValueError(f"{folder} lacks {missing}, which {index.name} names")
    return [folder / name for name in names]


def _mapped_tensors(file: Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors of a file by name; floating-point tensors are converted to `dtype` if needed."""
    try:
        with safe_open(file, framework="pt") as reader:
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if dtype is None:
        return tensors
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}


def _load_weights(model: PreTrainedModel, tensors: dict[str, Tensor], folder: str | Path) -> None:
    """Load the weights into the model; ValueError if any are missing or unknown."""
    try:
        unknown = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    except RuntimeError as error:  # for wrong shapes, one line each after the first
        reason = str(error).splitlines()[1].strip()
        raise ValueError(f"{folder} does not hold what its config says: {reason}") from error
    model.tie_weights()
    missing = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if missing or unknown:
        raise ValueError(
            f"{folder} does not hold a {type(model).__name__} as save_pretrained writes it: "
            f"missing {missing[:3]}, unknown {list(unknown)[:3]}"
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
