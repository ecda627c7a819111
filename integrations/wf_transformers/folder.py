"""Models from a folder, their weights mapped from its safetensors files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer


def model_from_folder(folder: str | Path) -> PreTrainedModel:
    """A causal language model whose weights are mapped from files, and not read.

    The system reads what is used, and may drop it again: host memory holds no copy of the model
    beside the files' pages.

    Args:
        folder: what `save_pretrained` wrote, with safetensors.

    Raises:
        ValueError: if it has no safetensors files, or tensors with other names than the model's.
    """
    from accelerate import init_empty_weights

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no *.safetensors files")
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, torch_dtype=config.torch_dtype)
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}
    unknown = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    missing = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if missing or unknown:
        raise ValueError(
            f"{folder} does not hold a {type(model).__name__} as save_pretrained writes it: "
            f"missing {missing[:3]}, unknown {list(unknown)[:3]}"
        )
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


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
        """
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
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
    return Generator(model_from_folder(folder), AutoTokenizer.from_pretrained(folder))
