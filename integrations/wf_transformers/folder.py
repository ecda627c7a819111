"""Models from a folder, their weights mapped from its safetensors files."""

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

from wf_transformers.shape import refused_by_name


def model_from_folder(
    folder: str | Path, torch_dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A causal language model whose weights are mapped from files, and not read.

    The system reads what is used, and may drop it again: host memory holds no copy of the model
    beside the files' pages. Weights of another type than the model's are read and converted; those
    that transformers 5 itself brings together, such as experts, it reads.

    Args:
        folder: what `save_pretrained` wrote, with safetensors.
        torch_dtype: of the model. None: what its config says, and if it says nothing, as the files
            have it.

    Raises:
        ValueError: if it has no safetensors files or lacks some, or holds quantized weights, or
            tensors of other names or shapes than the model's.
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
    if _conversions(config.model_type):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype)
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _mapped(file, dtype)
    _take(model, tensors, folder)
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _conversions(model_type: str) -> Any:
    """How transformers 5 turns the tensors of a file into other ones, if it does."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:  # transformers 4
        return None
    return get_checkpoint_conversion_mapping(model_type)


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read; others may be left from an earlier save."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (whole := folder / SAFE_WEIGHTS_NAME).exists():
        return [whole]
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


def _mapped(file: Path, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors of a file by name; floating ones of another type than `dtype` converted."""
    try:
        with safe_open(file, framework="pt") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if dtype is None:
        return found
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in found.items()}


def _take(model: PreTrainedModel, tensors: dict[str, Tensor], folder: str | Path) -> None:
    """Give the model these weights; ValueError if they are not all of them, and only these."""
    try:
        unknown = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    except RuntimeError as error:  # of shapes, a line each
        first = str(error).splitlines()[1].strip()
        raise ValueError(f"{folder} does not hold what its config says: {first}") from error
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
        """Call `write` with the text of each new token, in order; sample if there is a seed.

        on_host: whether the model's inputs are on the host and not on torch's accelerator.

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
        # Half of a character that several tokens make waits for the rest of it.
        added = "" if text.endswith("\ufffd") else text[len(self.text) :]
        self.text += added
        self.write(added)

    def end(self) -> None:
        pass


def generator(folder: Path) -> Generator:
    """What `wallfacer generate` asks for."""
    with refused_by_name(folder):
        tokenizer = AutoTokenizer.from_pretrained(folder)  # first: it fails in less time
        return Generator(model_from_folder(folder), tokenizer)
